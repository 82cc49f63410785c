-- What an attempt came to, as columns: see SQLite's `0006_outcomes.sql`.

LOCK TABLE rollouts, attempts, spans IN SHARE ROW EXCLUSIVE MODE; -- what is written meanwhile would be left out

ALTER TABLE attempts
    ADD COLUMN reward DOUBLE PRECISION,
    ADD COLUMN rewards TEXT NOT NULL DEFAULT '',
    ADD COLUMN reward_span BIGINT NOT NULL DEFAULT 0,
    ADD COLUMN prompt_tokens BIGINT NOT NULL DEFAULT 0,
    ADD COLUMN response_tokens BIGINT NOT NULL DEFAULT 0,
    ADD COLUMN cost DOUBLE PRECISION,
    ADD COLUMN failure TEXT COLLATE "C";
ALTER TABLE rollouts
    ADD COLUMN arm TEXT COLLATE "C",
    ADD COLUMN resources_version BIGINT,
    ADD COLUMN reward DOUBLE PRECISION,
    ADD COLUMN tokens BIGINT,
    ADD COLUMN cost DOUBLE PRECISION,
    ADD COLUMN seconds DOUBLE PRECISION,
    ADD COLUMN failure TEXT COLLATE "C";

-- Read as text, because JSON may hold what PostgreSQL's own JSON refuses. A name of an attribute with a colon behind it cannot
-- stand inside a string, where its quotation mark is escaped.
UPDATE attempts SET reward = found.reward, reward_span = found.sequence_id,
       rewards = json_build_object(coalesce(found.name, 'primary'), found.reward)::text
FROM (
    SELECT DISTINCT ON (s.rollout, s.attempt) s.rollout, s.attempt, s.sequence_id,
           substring(s.attributes FROM '"(?:leyden|agentlightning)\.reward\.0\.value": ?(-?[0-9.eE+-]+)')::double precision AS reward,
           substring(s.attributes FROM '"(?:leyden|agentlightning)\.reward\.0\.name": ?"([^"\\]*)"') AS name
    FROM spans s WHERE s.attributes ~ '"(?:leyden|agentlightning)\.reward\.0\.value": ?-?[0-9]'
    ORDER BY s.rollout, s.attempt, s.sequence_id DESC, s.key DESC
) found
WHERE attempts.rollout = found.rollout AND attempts.sequence_id = found.attempt;
UPDATE attempts SET prompt_tokens = counted.prompt_tokens, response_tokens = counted.response_tokens
FROM (
    SELECT s.rollout, s.attempt,
           coalesce(sum(substring(s.attributes FROM '"gen_ai\.usage\.input_tokens": ?([0-9]+)')::bigint), 0) AS prompt_tokens,
           coalesce(sum(substring(s.attributes FROM '"gen_ai\.usage\.output_tokens": ?([0-9]+)')::bigint), 0) AS response_tokens
    FROM spans s WHERE s.name IN ('leyden.model_call', 'leyden.embeddings') GROUP BY s.rollout, s.attempt
) counted
WHERE attempts.rollout = counted.rollout AND attempts.sequence_id = counted.attempt;
UPDATE attempts SET failure = coalesce(substring(metadata FROM '"reason_kind": ?"([^"]*)"'), status)
WHERE status IN ('failed', 'timeout');
UPDATE rollouts SET resources_version = (
    SELECT max(s.version) FROM resources s
    WHERE s.resources_id = rollouts.resources_id AND s.update_time <= rollouts.start_time
) WHERE resources_id IS NOT NULL;
UPDATE rollouts SET reward = a.reward, tokens = a.prompt_tokens + a.response_tokens, cost = a.cost,
       seconds = a.end_time - a.start_time,
       failure = CASE WHEN rollouts.status = 'failed' THEN coalesce(a.failure, 'failed') END
FROM attempts a
WHERE a.rollout = rollouts.seq AND a.sequence_id = rollouts.attempts AND rollouts.end_time IS NOT NULL;

CREATE INDEX rollouts_outcomes ON rollouts
    (run, status, failure, reward, tokens, cost, seconds, end_time, mode, arm, resources_id, resources_version, seq)
    WHERE end_time IS NOT NULL;
CREATE INDEX rollouts_of_arm ON rollouts (arm, seq) WHERE arm IS NOT NULL;
