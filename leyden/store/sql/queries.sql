-- Every statement of the store, by name. Parameters are `:name` (or `?`, in the one that runs most); `{other}` stands for another query of this file.
-- A line `-- name: x` begins a query, the comment below it says what it is for.

-- name: select_rollouts
-- A rollout and its latest attempt (NULLs where there is none yet), in the order that `rows.py` reads.
SELECT r.seq, r.rollout_id, r.status, r.mode, r.resources_id, r.input, r.config, r.metadata, r.start_time, r.end_time,
       r.attempts, r.interrupted,
       a.sequence_id, a.attempt_id, a.status, a.worker_id, a.start_time, a.end_time, a.last_heartbeat_time, a.metadata
FROM rollouts r LEFT JOIN attempts a ON a.rollout = r.seq AND a.sequence_id = r.attempts

-- name: get_rollout
-- One rollout with its latest attempt.
{select_rollouts} WHERE r.rollout_id = :rollout_id

-- name: get_rollout_with_attempt
-- One rollout with one of its attempts, NULLs if it has no such attempt.
SELECT r.seq, r.rollout_id, r.status, r.mode, r.resources_id, r.input, r.config, r.metadata, r.start_time, r.end_time,
       r.attempts, r.interrupted,
       a.sequence_id, a.attempt_id, a.status, a.worker_id, a.start_time, a.end_time, a.last_heartbeat_time, a.metadata
FROM rollouts r LEFT JOIN attempts a ON a.rollout = r.seq AND a.attempt_id = :attempt_id
WHERE r.rollout_id = :rollout_id

-- name: count_rollouts
-- How many rollouts match; the page's filters follow.
SELECT count(*) FROM rollouts r

-- name: get_rollout_key
-- Where a rollout is, and how far it has come.
SELECT seq, attempts, status FROM rollouts WHERE rollout_id = :rollout_id

-- name: insert_rollout
-- A new rollout at the end of the queue, or already claimed (`attempts` 1).
INSERT INTO rollouts (rollout_id, status, mode, resources_id, input, config, metadata, start_time, attempts,
                      timeout_seconds, unresponsive_seconds)
VALUES (:rollout_id, :status, :mode, :resources_id, :input, :config, :metadata, :start_time, :attempts,
        :timeout_seconds, :unresponsive_seconds)

-- name: next_in_queue
-- The oldest that wait, each like a row of `select_rollouts` without its attempt. Its transaction lets nobody else take them:
-- SQLite has one writer at a time; PostgreSQL adds FOR UPDATE SKIP LOCKED. SQLite needs to be told the index.
SELECT r.seq, r.rollout_id, r.status, r.mode, r.resources_id, r.input, r.config, r.metadata, r.start_time, r.end_time,
       r.attempts, r.interrupted
FROM rollouts r INDEXED BY rollouts_queue
WHERE r.status IN ('queuing', 'requeuing') ORDER BY r.seq LIMIT :limit

-- name: begin_attempt
-- A rollout goes on to its next attempt.
UPDATE rollouts SET status = 'preparing', attempts = :attempts WHERE seq = :seq

-- name: set_rollout_status
-- A rollout follows one of its attempts, or its user.
UPDATE rollouts SET status = :status, end_time = :end_time WHERE seq = :seq

-- name: set_rollout
-- Everything of a rollout that its user may change.
UPDATE rollouts SET input = :input, mode = :mode, resources_id = :resources_id, config = :config, metadata = :metadata,
       timeout_seconds = :timeout_seconds, unresponsive_seconds = :unresponsive_seconds
WHERE seq = :seq

-- name: requeue_interrupted
-- A rollout whose attempt ended with its process; that attempt does not count.
UPDATE rollouts SET status = 'requeuing', interrupted = interrupted + 1 WHERE seq = :seq

-- name: unclaim_rollout
-- A rollout goes back to where it was before a claim that nobody received.
UPDATE rollouts SET status = :status, attempts = attempts - 1 WHERE seq = :seq

-- name: count_rollouts_by_status
-- For statistics: one scan of the status index.
SELECT status, count(*) FROM rollouts GROUP BY status

-- name: insert_attempt
-- A new attempt, which its worker is preparing.
INSERT INTO attempts (rollout, sequence_id, attempt_id, status, worker_id, start_time)
VALUES (:rollout, :sequence_id, :attempt_id, 'preparing', :worker_id, :start_time)

-- name: select_attempts
-- The attempts of one rollout; the page's order follows.
SELECT a.sequence_id, a.attempt_id, a.status, a.worker_id, a.start_time, a.end_time, a.last_heartbeat_time, a.metadata
FROM attempts a WHERE a.rollout = :seq

-- name: set_attempt
-- Everything of an attempt that may change.
UPDATE attempts SET status = :status, worker_id = :worker_id, end_time = :end_time,
       last_heartbeat_time = :last_heartbeat_time, metadata = :metadata
WHERE rollout = :rollout AND sequence_id = :sequence_id

-- name: delete_attempt
-- An attempt that nobody received.
DELETE FROM attempts WHERE rollout = :rollout AND sequence_id = :sequence_id AND status = 'preparing' AND last_span = 0

-- name: select_unfinished
-- The attempts that are not over, oldest first, each with its rollout.
SELECT r.seq, r.rollout_id, r.status, r.mode, r.resources_id, r.input, r.config, r.metadata, r.start_time, r.end_time,
       r.attempts, r.interrupted,
       a.sequence_id, a.attempt_id, a.status, a.worker_id, a.start_time, a.end_time, a.last_heartbeat_time, a.metadata
FROM attempts a JOIN rollouts r ON r.seq = a.rollout
WHERE a.end_time IS NULL

-- name: select_overdue
-- Those of them whose time is over, or which have been silent for too long.
{select_unfinished}
  AND (a.start_time + r.timeout_seconds <= :now
       OR a.status <> 'unresponsive' AND coalesce(a.last_heartbeat_time, a.start_time) + r.unresponsive_seconds <= :now)
ORDER BY a.start_time, a.rollout, a.sequence_id

-- name: next_deadlines
-- When the next attempt runs out of time, and when the next will have been silent for too long; NULL for never.
SELECT min(a.start_time + r.timeout_seconds),
       min(CASE WHEN a.status <> 'unresponsive'
           THEN coalesce(a.last_heartbeat_time, a.start_time) + r.unresponsive_seconds END)
FROM attempts a JOIN rollouts r ON r.seq = a.rollout
WHERE a.end_time IS NULL

-- name: count_attempts
-- For statistics.
SELECT count(*) FROM attempts

-- name: get_span_target
-- What a span must know of its attempt and rollout.
SELECT r.seq, r.status, r.attempts, a.sequence_id, a.status, a.last_span, a.worker_id
FROM rollouts r LEFT JOIN attempts a ON a.rollout = r.seq AND a.attempt_id = :attempt_id
WHERE r.rollout_id = :rollout_id

-- name: get_span_counters
-- A rollout with each of its attempts (NULLs where there is none) and the highest span number drawn: about how many it has.
SELECT r.seq, r.attempts, a.sequence_id, a.attempt_id, a.last_span
FROM rollouts r LEFT JOIN attempts a ON a.rollout = r.seq WHERE r.rollout_id = :rollout_id

-- name: insert_span
-- A span, unless the attempt has it already; values in the order of `rows.span_values`.
INSERT INTO spans (rollout, attempt, sequence_id, span_id, trace_id, parent_id, name, status_code, status_description,
                   start_time, end_time, attributes, events, resource, tokens)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (rollout, attempt, span_id) DO NOTHING

-- name: draw_span_sequence
-- The attempt's counter moves on.
UPDATE attempts SET last_span = :last_span WHERE rollout = :rollout AND sequence_id = :sequence_id

-- name: beat_heart
-- The counter moves on, and the attempt is alive.
UPDATE attempts SET last_span = :last_span, last_heartbeat_time = :now
WHERE rollout = :rollout AND sequence_id = :sequence_id

-- name: run_attempt
-- The same for an attempt that was preparing or silent.
UPDATE attempts SET last_span = :last_span, last_heartbeat_time = :now, status = :status
WHERE rollout = :rollout AND sequence_id = :sequence_id

-- name: select_spans
-- The spans of a rollout, in the order that `rows.py` reads; the page's filters follow.
SELECT s.attempt, s.sequence_id, s.span_id, s.trace_id, s.parent_id, s.name, s.status_code, s.status_description,
       s.start_time, s.end_time, s.attributes, s.events, s.resource, s.tokens
FROM spans s

-- name: count_spans_of
-- How many spans match; the page's filters follow.
SELECT count(*) FROM spans s

-- name: count_spans
-- For statistics.
SELECT count(*) FROM spans

-- name: get_latest_resources
-- The resources written last.
SELECT resources_id, version, create_time, update_time, resources FROM resources ORDER BY key DESC LIMIT 1

-- name: get_latest_resources_id
-- Their id.
SELECT resources_id FROM resources ORDER BY key DESC LIMIT 1

-- name: get_resources
-- The newest version under an id.
SELECT resources_id, version, create_time, update_time, resources FROM resources
WHERE resources_id = :resources_id ORDER BY version DESC LIMIT 1

-- name: has_resources
-- Whether an id is known.
SELECT 1 FROM resources WHERE resources_id = :resources_id LIMIT 1

-- name: insert_resources
-- A new version; it is now the latest of all.
INSERT INTO resources (resources_id, version, create_time, update_time, resources)
VALUES (:resources_id, :version, :create_time, :update_time, :resources)

-- name: select_resources
-- Versions of resources; the page's filters follow.
SELECT s.resources_id, s.version, s.create_time, s.update_time, s.resources FROM resources s

-- name: count_resources_of
-- How many versions match; the page's filters follow.
SELECT count(*) FROM resources s

-- name: count_resources
-- For statistics: ids, whatever the number of their versions.
SELECT count(*) FROM resources WHERE version = 1

-- name: select_workers
-- Workers; the page's filters follow.
SELECT w.worker_id, w.status, w.heartbeat_stats, w.last_heartbeat_time, w.last_dequeue_time, w.last_busy_time,
       w.last_idle_time, w.current_rollout_id, w.current_attempt_id
FROM workers w

-- name: get_worker
-- One worker.
{select_workers} WHERE w.worker_id = :worker_id

-- name: count_workers
-- How many workers match; the page's filters follow.
SELECT count(*) FROM workers w

-- name: beat_worker
-- A worker's own heartbeat; `keep` is 1 to leave its figures as they are.
INSERT INTO workers (worker_id, status, heartbeat_stats, last_heartbeat_time)
VALUES (:worker_id, 'unknown', :heartbeat_stats, :now)
ON CONFLICT (worker_id) DO UPDATE SET last_heartbeat_time = :now,
    heartbeat_stats = CASE WHEN :keep = 1 THEN workers.heartbeat_stats ELSE :heartbeat_stats END

-- name: worker_claimed
-- A worker came to the queue and got an attempt.
INSERT INTO workers (worker_id, status, last_dequeue_time, last_busy_time, current_rollout_id, current_attempt_id)
VALUES (:worker_id, 'busy', :now, :now, :rollout_id, :attempt_id)
ON CONFLICT (worker_id) DO UPDATE SET status = 'busy', last_dequeue_time = :now, last_busy_time = :now,
    current_rollout_id = :rollout_id, current_attempt_id = :attempt_id

-- name: worker_found_nothing
-- A worker came to the queue and it was empty; it is idle since it became so.
INSERT INTO workers (worker_id, status, last_dequeue_time, last_idle_time)
VALUES (:worker_id, 'idle', :now, :now)
ON CONFLICT (worker_id) DO UPDATE SET last_dequeue_time = :now,
    last_idle_time = CASE WHEN workers.status = 'idle' THEN workers.last_idle_time ELSE :now END,
    status = 'idle', current_rollout_id = NULL, current_attempt_id = NULL

-- name: worker_busy
-- A worker has an attempt that it did not get from the queue.
INSERT INTO workers (worker_id, status, last_busy_time, current_rollout_id, current_attempt_id)
VALUES (:worker_id, 'busy', :now, :rollout_id, :attempt_id)
ON CONFLICT (worker_id) DO UPDATE SET status = 'busy', last_busy_time = :now,
    current_rollout_id = :rollout_id, current_attempt_id = :attempt_id

-- name: worker_freed
-- A worker's attempt is over (`idle`) or silent (`unknown`); nothing changes if it has another one by now.
UPDATE workers SET last_idle_time = :now, status = :status, current_rollout_id = NULL, current_attempt_id = NULL
WHERE worker_id = :worker_id AND current_rollout_id = :rollout_id AND current_attempt_id = :attempt_id

-- name: worker_revived
-- A worker that was thought lost gave a sign of life from its attempt; nothing changes if it has another one by now.
UPDATE workers SET last_busy_time = :now, status = 'busy', current_rollout_id = :rollout_id,
    current_attempt_id = :attempt_id
WHERE worker_id = :worker_id AND status = 'unknown' AND current_attempt_id IS NULL
