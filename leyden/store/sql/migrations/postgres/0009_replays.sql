-- The rollout that a replay or a fork repeats, so that the forks of a rollout are found without reading the others.

ALTER TABLE rollouts ADD COLUMN replay_from TEXT COLLATE "C"; -- a rollout_id, from the metadata; that rollout may be forgotten
CREATE INDEX rollouts_of_replay ON rollouts (replay_from, seq) WHERE replay_from IS NOT NULL;
UPDATE rollouts
SET replay_from = substring(metadata from '"leyden\.replay_from": ?\{[^{}]*"rollout_id": ?"([^"\\]+)"')
WHERE position('"leyden.replay_from"' in metadata) > 0;
