-- How many answered calls of an attempt have no known cost, and what the attempts took that retention has removed.

ALTER TABLE attempts ADD COLUMN unpriced_calls INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN pruned_attempts INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN pruned_prompt_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN pruned_response_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN pruned_cost REAL; -- NULL: no call had a known cost
ALTER TABLE runs ADD COLUMN pruned_unpriced_calls INTEGER NOT NULL DEFAULT 0;

UPDATE attempts SET unpriced_calls = (
    SELECT count(*) FROM spans s
    WHERE s.rollout = attempts.rollout AND s.attempt = attempts.sequence_id AND s.status_code = 'OK'
      AND s.name IN ('leyden.model_call', 'leyden.embeddings')
      AND s.attributes NOT LIKE '%"leyden.cost"%' AND s.attributes NOT LIKE '%"leyden.replayed"%'
) WHERE prompt_tokens + response_tokens > 0;
