-- The rollout that a replay or a fork repeats, so that the forks of a rollout are found without reading the others.

ALTER TABLE rollouts ADD COLUMN replay_from TEXT; -- a rollout_id, from the metadata; that rollout may be forgotten
CREATE INDEX rollouts_of_replay ON rollouts (replay_from) WHERE replay_from IS NOT NULL;
UPDATE rollouts
SET replay_from = CASE WHEN json_valid(metadata) THEN json_extract(metadata, '$."leyden.replay_from".rollout_id') END
WHERE instr(metadata, '"leyden.replay_from"') > 0;
