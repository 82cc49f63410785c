-- What an attempt came to, as columns: its final reward, what its model calls took, why it failed. A finished rollout has
-- those of its latest attempt too, where pages are sorted by them and histograms are counted.

ALTER TABLE attempts ADD COLUMN reward REAL;              -- the primary one of the last reward span; NULL: none
ALTER TABLE attempts ADD COLUMN rewards TEXT NOT NULL DEFAULT ''; -- JSON: all of that span, by name; '': none
ALTER TABLE attempts ADD COLUMN reward_span INTEGER NOT NULL DEFAULT 0; -- the sequence_id of that span
ALTER TABLE attempts ADD COLUMN prompt_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN response_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN cost REAL;                -- NULL: no call had a price
ALTER TABLE attempts ADD COLUMN failure TEXT;             -- NULL: unfinished, or succeeded

ALTER TABLE rollouts ADD COLUMN arm TEXT;
ALTER TABLE rollouts ADD COLUMN resources_version INTEGER;
ALTER TABLE rollouts ADD COLUMN reward REAL;
ALTER TABLE rollouts ADD COLUMN tokens INTEGER;
ALTER TABLE rollouts ADD COLUMN cost REAL;
ALTER TABLE rollouts ADD COLUMN seconds REAL;
ALTER TABLE rollouts ADD COLUMN failure TEXT;

-- A name of an attribute with a colon behind it cannot stand inside a string, where its quotation mark is escaped.
UPDATE attempts SET (reward, rewards, reward_span) = (
    SELECT coalesce(json_extract(s.attributes, '$."leyden.reward.0.value"'),
                    json_extract(s.attributes, '$."agentlightning.reward.0.value"')),
           json_object(coalesce(json_extract(s.attributes, '$."leyden.reward.0.name"'),
                                json_extract(s.attributes, '$."agentlightning.reward.0.name"'), 'primary'),
                       coalesce(json_extract(s.attributes, '$."leyden.reward.0.value"'),
                                json_extract(s.attributes, '$."agentlightning.reward.0.value"'))),
           s.sequence_id
    FROM spans s
    WHERE s.rollout = attempts.rollout AND s.attempt = attempts.sequence_id
      AND (s.attributes LIKE '%"leyden.reward.0.value":%' OR s.attributes LIKE '%"agentlightning.reward.0.value":%')
    ORDER BY s.sequence_id DESC, s.key DESC LIMIT 1
) WHERE EXISTS (
    SELECT 1 FROM spans s WHERE s.rollout = attempts.rollout AND s.attempt = attempts.sequence_id
      AND (s.attributes LIKE '%"leyden.reward.0.value":%' OR s.attributes LIKE '%"agentlightning.reward.0.value":%')
);
UPDATE attempts SET (prompt_tokens, response_tokens) = (
    SELECT coalesce(sum(json_extract(s.attributes, '$."gen_ai.usage.input_tokens"')), 0),
           coalesce(sum(json_extract(s.attributes, '$."gen_ai.usage.output_tokens"')), 0)
    FROM spans s
    WHERE s.rollout = attempts.rollout AND s.attempt = attempts.sequence_id AND s.attributes <> ''
      AND s.name IN ('leyden.model_call', 'leyden.embeddings')
);
UPDATE attempts SET failure = coalesce(json_extract(nullif(metadata, ''), '$.reason_kind'), status)
WHERE status IN ('failed', 'timeout');
UPDATE rollouts SET resources_version = (
    SELECT max(s.version) FROM resources s
    WHERE s.resources_id = rollouts.resources_id AND s.update_time <= rollouts.start_time
) WHERE resources_id IS NOT NULL;
UPDATE rollouts SET (reward, tokens, cost, seconds, failure) = (
    SELECT a.reward, a.prompt_tokens + a.response_tokens, a.cost, a.end_time - a.start_time,
           CASE WHEN rollouts.status = 'failed' THEN coalesce(a.failure, 'failed') END
    FROM attempts a WHERE a.rollout = rollouts.seq AND a.sequence_id = rollouts.attempts
) WHERE end_time IS NOT NULL;

-- All that a filter, an order or a histogram reads of a finished rollout, so that none of them reads the rollouts themselves.
-- SQLite reads `end_time` for the condition of the index, so it is a column of it too.
CREATE INDEX rollouts_outcomes ON rollouts
    (run, status, failure, reward, tokens, cost, seconds, end_time, mode, arm, resources_id, resources_version)
    WHERE end_time IS NOT NULL;
CREATE INDEX rollouts_of_arm ON rollouts (arm) WHERE arm IS NOT NULL;
