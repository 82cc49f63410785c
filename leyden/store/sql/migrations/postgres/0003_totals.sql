-- Counts that are kept, and orders for pages: see SQLite's `0003_totals.sql`. A finished rollout changes one of several rows of
-- `totals`, so that stores that finish rollouts at the same time seldom wait for each other.

LOCK TABLE rollouts, attempts, spans IN SHARE ROW EXCLUSIVE MODE; -- what is written meanwhile would not be counted

CREATE TABLE totals (
    shard INTEGER PRIMARY KEY,
    enqueued BIGINT NOT NULL DEFAULT 0, -- rollouts, whatever became of them
    forgotten BIGINT NOT NULL DEFAULT 0,
    succeeded BIGINT NOT NULL DEFAULT 0,
    failed BIGINT NOT NULL DEFAULT 0,
    cancelled BIGINT NOT NULL DEFAULT 0,
    attempts BIGINT NOT NULL DEFAULT 0,
    spans BIGINT NOT NULL DEFAULT 0,
    bytes BIGINT NOT NULL DEFAULT 0,
    resources BIGINT NOT NULL DEFAULT 0
) WITH (fillfactor = 25);
ALTER TABLE attempts ADD COLUMN spans BIGINT NOT NULL DEFAULT 0;
UPDATE attempts SET spans = counted.spans
FROM (SELECT rollout, attempt, count(*) AS spans FROM spans GROUP BY rollout, attempt) counted
WHERE attempts.rollout = counted.rollout AND attempts.sequence_id = counted.attempt;
INSERT INTO totals
SELECT 0, count(*), 0, count(*) FILTER (WHERE status = 'succeeded'), count(*) FILTER (WHERE status = 'failed'),
       count(*) FILTER (WHERE status = 'cancelled'), coalesce(sum(attempts) FILTER (WHERE end_time IS NOT NULL), 0),
       (SELECT coalesce(sum(a.spans), 0) FROM attempts a JOIN rollouts f ON f.seq = a.rollout WHERE f.end_time IS NOT NULL),
       coalesce(sum(bytes) FILTER (WHERE end_time IS NOT NULL), 0),
       (SELECT count(DISTINCT resources_id) FROM resources)
FROM rollouts;
INSERT INTO totals (shard) SELECT generate_series(1, 15);

DROP INDEX rollouts_status;
DROP INDEX rollouts_finished;
CREATE INDEX rollouts_started ON rollouts (start_time, seq);
CREATE INDEX rollouts_waiting ON rollouts (seq) WHERE status = 'queuing';
CREATE INDEX rollouts_requeued ON rollouts (seq) WHERE status = 'requeuing';
CREATE INDEX rollouts_finished ON rollouts (status, seq) WHERE end_time IS NOT NULL;
CREATE INDEX rollouts_finished_started ON rollouts (status, start_time, seq) WHERE end_time IS NOT NULL;
CREATE INDEX rollouts_finished_ended ON rollouts (status, end_time, seq) WHERE end_time IS NOT NULL;
