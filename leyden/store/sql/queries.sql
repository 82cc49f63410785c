-- Every statement of the store, by name. A line `-- name: x` begins a query, and the comment below
-- describes it. Parameters are `:name`, or `?` in the statements that run most often. `{other}`
-- stands for another query of this file.

-- name: rollout_columns
-- No query: the columns of a rollout, in the order that `rows.py` reads.
r.seq, r.rollout_id, r.status, r.mode, r.resources_id, r.input, r.config, r.metadata, r.start_time, r.end_time,
       r.attempts, r.interrupted, r.priority, (SELECT u.run_id FROM runs u WHERE u.key = r.run), r.group_id, r.arm,
       r.resources_version

-- name: attempt_columns
-- No query: the columns of an attempt, in the order that `rows.py` reads.
a.sequence_id, a.attempt_id, a.status, a.worker_id, a.start_time, a.end_time, a.last_heartbeat_time, a.metadata, a.bytes, a.spans,
       a.reward, a.rewards, a.prompt_tokens, a.response_tokens, a.cost, a.failure, a.unpriced_calls

-- name: span_columns
-- No query: the columns of a span, in the order that `rows.py` reads.
s.key, s.tokens_base, s.tokens, s.attempt, s.sequence_id, s.span_id, s.trace_id, s.parent_id, s.name, s.kind, s.status_code,
       s.status_description, s.start_time, s.end_time, s.attributes, s.events, s.resource

-- name: select_rollouts
-- Rollouts, each with its latest attempt (NULLs if it has none yet), in the order that `rows.py`
-- reads.
SELECT {rollout_columns}, {attempt_columns}
FROM rollouts r LEFT JOIN attempts a ON a.rollout = r.seq AND a.sequence_id = r.attempts

-- name: get_rollout
-- One rollout with its latest attempt.
{select_rollouts} WHERE r.rollout_id = :rollout_id

-- name: get_rollout_with_attempt
-- One rollout with one of its attempts; NULLs if it has no such attempt.
SELECT {rollout_columns}, {attempt_columns}
FROM rollouts r LEFT JOIN attempts a ON a.rollout = r.seq AND a.attempt_id = :attempt_id
WHERE r.rollout_id = :rollout_id

-- name: select_rollouts_at
-- The rollouts whose numbers are in a JSON list, in any order.
{select_rollouts} WHERE r.seq IN (SELECT value FROM json_each(:seqs))

-- name: select_rollout_seqs
-- The numbers of the rollouts of a page. Filters, order and limit follow.
SELECT r.seq FROM rollouts r

-- name: select_rollout_seqs_of_run
-- The numbers of the rollouts of one run. Filters, order and limit follow. SQLite does not choose
-- the index by itself.
SELECT r.seq FROM rollouts r INDEXED BY rollouts_of_run WHERE r.run = :run

-- name: select_rollout_seqs_of_group
-- The numbers of the rollouts of one group. Filters, order and limit follow. SQLite does not choose
-- the index by itself.
SELECT r.seq FROM rollouts r INDEXED BY rollouts_of_group WHERE r.group_id = :group_id

-- name: select_rollout_seqs_of_replay
-- The numbers of the rollouts that repeat one rollout. Filters, order and limit follow. SQLite does
-- not choose the index by itself.
SELECT r.seq FROM rollouts r INDEXED BY rollouts_of_replay WHERE r.replay_from = :replay_from

-- name: select_rollout_starts
-- The numbers of rollouts with their starts, by which pages of several statuses are merged.
-- Filters, order and limit follow.
SELECT r.seq, r.start_time FROM rollouts r

-- name: select_rollout_ends
-- The numbers of finished rollouts with their ends, by which pages of several statuses are merged.
-- Filters, order and limit follow.
SELECT r.seq, r.end_time FROM rollouts r

-- name: finished_rollouts
-- No query: the finished rollouts, read from the index that holds their outcomes. SQLite does not
-- choose the index by itself.
rollouts r INDEXED BY rollouts_outcomes WHERE r.end_time IS NOT NULL

-- name: select_finished_seqs
-- The numbers of the finished rollouts of a page that is sorted by an outcome. Filters, order and
-- limit follow.
SELECT r.seq FROM {finished_rollouts}

-- name: count_outcomes
-- Count finished rollouts by status and failure. Filters and their groups follow.
SELECT r.status, r.failure, count(*) FROM {finished_rollouts}

-- name: summarise_reward
-- Count finished rollouts by status and failure, with count, sum, minimum and maximum of the
-- reward. Filters and their groups follow.
SELECT r.status, r.failure, count(*), count(r.reward), sum(r.reward), min(r.reward), max(r.reward) FROM {finished_rollouts}

-- name: histogram_of_reward
-- The bin of each reward as one character, chr(1 + bin), in one text. GROUP BY would first sort the
-- values, which takes most of the time (60 ms for 100,000). Filters follow.
SELECT group_concat(char(1 + CAST((r.reward - :lowest) * :bins_per_unit AS INTEGER)), '') FROM {finished_rollouts}

-- name: summarise_tokens
-- Count finished rollouts by status and failure, with count, sum, minimum and maximum of the
-- tokens. Filters and their groups follow.
SELECT r.status, r.failure, count(*), count(r.tokens), sum(r.tokens), min(r.tokens), max(r.tokens) FROM {finished_rollouts}

-- name: histogram_of_tokens
-- The bin of each number of tokens as one character; see `histogram_of_reward`. Filters follow.
SELECT group_concat(char(1 + CAST((r.tokens - :lowest) * :bins_per_unit AS INTEGER)), '') FROM {finished_rollouts}

-- name: summarise_cost
-- Count finished rollouts by status and failure, with count, sum, minimum and maximum of the cost.
-- Filters and their groups follow.
SELECT r.status, r.failure, count(*), count(r.cost), sum(r.cost), min(r.cost), max(r.cost) FROM {finished_rollouts}

-- name: histogram_of_cost
-- The bin of each cost as one character; see `histogram_of_reward`. Filters follow.
SELECT group_concat(char(1 + CAST((r.cost - :lowest) * :bins_per_unit AS INTEGER)), '') FROM {finished_rollouts}

-- name: summarise_seconds
-- Count finished rollouts by status and failure, with count, sum, minimum and maximum of the
-- seconds. Filters and their groups follow.
SELECT r.status, r.failure, count(*), count(r.seconds), sum(r.seconds), min(r.seconds), max(r.seconds) FROM {finished_rollouts}

-- name: histogram_of_seconds
-- The bin of each duration as one character; see `histogram_of_reward`. Filters follow.
SELECT group_concat(char(1 + CAST((r.seconds - :lowest) * :bins_per_unit AS INTEGER)), '') FROM {finished_rollouts}

-- name: sum_spending
-- What the attempts of a run and of its algorithm took: those in the store, and those of the
-- rollouts that retention has removed.
SELECT max(u.pruned_attempts) + count(a.rollout), max(u.pruned_prompt_tokens) + coalesce(sum(a.prompt_tokens), 0),
       max(u.pruned_response_tokens) + coalesce(sum(a.response_tokens), 0), max(u.pruned_cost), sum(a.cost),
       max(u.pruned_unpriced_calls) + coalesce(sum(a.unpriced_calls), 0)
FROM runs u LEFT JOIN attempts a ON a.rollout IN (
    SELECT seq FROM rollouts WHERE run = :run UNION ALL SELECT seq FROM rollouts WHERE group_id = :algorithm)
WHERE u.key = :run

-- name: keep_spending
-- Add what the attempts of a rollout took to its run, before they are deleted. `run_id` names the run
-- of an algorithm's own calls.
UPDATE runs SET
    pruned_attempts = pruned_attempts + (SELECT count(*) FROM attempts WHERE rollout = :seq),
    pruned_prompt_tokens = pruned_prompt_tokens + (SELECT coalesce(sum(prompt_tokens), 0) FROM attempts WHERE rollout = :seq),
    pruned_response_tokens = pruned_response_tokens
        + (SELECT coalesce(sum(response_tokens), 0) FROM attempts WHERE rollout = :seq),
    pruned_cost = coalesce(pruned_cost + (SELECT sum(cost) FROM attempts WHERE rollout = :seq), pruned_cost,
                           (SELECT sum(cost) FROM attempts WHERE rollout = :seq)),
    pruned_unpriced_calls = pruned_unpriced_calls + (SELECT coalesce(sum(unpriced_calls), 0) FROM attempts WHERE rollout = :seq)
WHERE key = :run OR run_id = :run_id

-- name: get_rollout_key
-- The number of a rollout, with its number of attempts and its status.
SELECT seq, attempts, status FROM rollouts WHERE rollout_id = :rollout_id

-- name: insert_rollout
-- Add a rollout at the end of the queue, or one that is already claimed (`attempts` 1).
INSERT INTO rollouts (rollout_id, status, mode, priority, resources_id, input, config, metadata, start_time, attempts,
                      timeout_seconds, unresponsive_seconds, run, group_id, arm, resources_version, replay_from)
VALUES (:rollout_id, :status, :mode, :priority, :resources_id, :input, :config, :metadata, :start_time, :attempts,
        :timeout_seconds, :unresponsive_seconds, :run, :group_id, :arm, :resources_version, :replay_from)

-- name: next_in_queue
-- The waiting rollouts by priority and age (1000 is `OVERTAKES`), as `select_rollouts` without
-- attempts, and whether any attribute is indexed. No other claim may take them in this transaction:
-- SQLite has one writer at a time, PostgreSQL adds FOR UPDATE SKIP LOCKED. SQLite does not choose
-- the index by itself.
SELECT {rollout_columns}, EXISTS (SELECT 1 FROM attribute_indexes)
FROM rollouts r INDEXED BY rollouts_queue
WHERE r.status IN ('queuing', 'requeuing') ORDER BY r.seq - r.priority * 1000, r.seq LIMIT :limit

-- name: begin_attempt
-- Move a rollout to its next attempt.
UPDATE rollouts SET status = 'preparing', attempts = :attempts WHERE seq = :seq

-- name: set_rollout_status
-- Set the status of an unfinished rollout, which follows one of its attempts or its user.
UPDATE rollouts SET status = :status WHERE seq = :seq

-- name: finish_rollout
-- Finish a rollout. `bytes` is its size with that of its attempts. The outcome is copied from its
-- latest attempt.
UPDATE rollouts SET status = :status, end_time = :end_time, bytes = :bytes, (reward, tokens, cost, seconds, failure) = (
    SELECT a.reward, a.prompt_tokens + a.response_tokens, a.cost, a.end_time - a.start_time,
           CASE WHEN :failed = 1 THEN coalesce(a.failure, 'failed') END
    FROM attempts a WHERE a.rollout = rollouts.seq AND a.sequence_id = rollouts.attempts)
WHERE seq = :seq

-- name: set_outcome
-- Update the outcome of an attempt after a span with a reward or a model call. Values: the reward,
-- all rewards, the number of their span, tokens of prompts and of responses, the cost, the calls of
-- unknown cost; the rollout, the attempt's number.
UPDATE attempts SET reward = ?, rewards = ?, reward_span = ?, prompt_tokens = ?, response_tokens = ?, cost = ?,
    unpriced_calls = ?
WHERE rollout = ? AND sequence_id = ?

-- name: follow_outcome
-- Copy an outcome that arrived late to a finished rollout.
UPDATE rollouts SET reward = :reward, tokens = :tokens, cost = :cost WHERE seq = :seq

-- name: sum_attempts
-- The bytes and the spans of all attempts of a rollout.
SELECT coalesce(sum(bytes), 0), coalesce(sum(spans), 0) FROM attempts WHERE rollout = :seq

-- name: grow_rollout
-- Add the size of late spans to a finished rollout.
UPDATE rollouts SET bytes = bytes + :bytes WHERE seq = :seq

-- name: set_rollout
-- Set everything of a rollout that its user may change.
UPDATE rollouts SET input = :input, mode = :mode, priority = :priority, resources_id = :resources_id,
       resources_version = :resources_version, config = :config, metadata = :metadata,
       timeout_seconds = :timeout_seconds, unresponsive_seconds = :unresponsive_seconds
WHERE seq = :seq

-- name: set_replay_from
-- Set the rollout that another one repeats, from its new metadata.
UPDATE rollouts SET replay_from = :replay_from WHERE seq = :seq

-- name: count_interruption
-- Count an interrupted attempt, which does not use up one of the rollout's attempts.
UPDATE rollouts SET interrupted = interrupted + 1 WHERE seq = :seq

-- name: unclaim_rollout
-- Return a rollout to its state before a claim that no worker received.
UPDATE rollouts SET status = :status, attempts = attempts - 1 WHERE seq = :seq

-- name: get_totals
-- The stored counts, in the order of `TOTALS`. SQLite numbers rollouts without gaps, so the highest
-- number is the count of all.
SELECT (SELECT coalesce(max(seq), 0) FROM rollouts), forgotten, succeeded, failed, cancelled, attempts, spans, bytes, resources
FROM totals

-- name: count_under_way
-- Count the rollouts that `totals` leaves out, by status, with their attempts and spans: rollouts
-- that were claimed and are not finished. Each has an open attempt or waits to be claimed again.
SELECT r.status, count(*), sum(r.attempts), sum((SELECT coalesce(sum(a.spans), 0) FROM attempts a WHERE a.rollout = r.seq))
FROM rollouts r
WHERE r.seq IN (SELECT rollout FROM attempts WHERE end_time IS NULL
                UNION SELECT seq FROM rollouts WHERE status = 'requeuing')
  AND r.end_time IS NULL
GROUP BY r.status

-- name: insert_attempt
-- Add an attempt, which its worker is preparing.
INSERT INTO attempts (rollout, sequence_id, attempt_id, status, worker_id, claim_id, start_time)
VALUES (:rollout, :sequence_id, :attempt_id, 'preparing', :worker_id, :claim_id, :start_time)

-- name: get_claim
-- The rollouts that were claimed under an id, in the order of the claim.
SELECT {rollout_columns}, {attempt_columns}
FROM attempts a JOIN rollouts r ON r.seq = a.rollout
WHERE a.claim_id = :claim_id ORDER BY r.seq - r.priority * 1000, r.seq

-- name: select_attempts
-- The attempts of one rollout. The page's order follows.
SELECT {attempt_columns}
FROM attempts a WHERE a.rollout = :seq

-- name: set_attempt
-- Set everything of an attempt that may change.
UPDATE attempts SET status = :status, worker_id = :worker_id, end_time = :end_time,
       last_heartbeat_time = :last_heartbeat_time, metadata = :metadata, failure = :failure
WHERE rollout = :rollout AND sequence_id = :sequence_id

-- name: claim_again
-- Count one more reply to a repeated claim.
UPDATE attempts SET answered = answered + 1 WHERE claim_id = :claim_id

-- name: delete_attempt
-- Delete an attempt that no worker received and that has not begun. `by_claimer` is 1 if the claimer
-- itself gives it back, because it may have sent the claim twice.
DELETE FROM attempts
WHERE rollout = :rollout AND sequence_id = :sequence_id AND status = 'preparing' AND last_span = 0
  AND (answered = 1 OR :by_claimer = 1)

-- name: select_unfinished
-- The unfinished attempts, each with its rollout.
SELECT {rollout_columns}, {attempt_columns}
FROM attempts a JOIN rollouts r ON r.seq = a.rollout
WHERE a.end_time IS NULL

-- name: select_overdue
-- The unfinished attempts whose time is over, or which have been silent for too long, oldest first.
{select_unfinished}
  AND (a.start_time + r.timeout_seconds <= :now
       OR a.status <> 'unresponsive' AND coalesce(a.last_heartbeat_time, a.start_time) + r.unresponsive_seconds <= :now)
ORDER BY a.start_time, a.rollout, a.sequence_id

-- name: next_deadlines
-- When the next attempt runs out of time, and when the next one will have been silent for too long;
-- NULL for never.
SELECT min(a.start_time + r.timeout_seconds),
       min(CASE WHEN a.status <> 'unresponsive'
           THEN coalesce(a.last_heartbeat_time, a.start_time) + r.unresponsive_seconds END)
FROM attempts a JOIN rollouts r ON r.seq = a.rollout
WHERE a.end_time IS NULL

-- name: get_span_target
-- The columns of attempt and rollout that adding a span needs, and whether any attribute is
-- indexed.
SELECT r.seq, r.status, r.attempts, a.sequence_id, a.status, a.last_span, a.worker_id, EXISTS (SELECT 1 FROM attribute_indexes),
       a.reward, a.rewards, a.reward_span, a.prompt_tokens, a.response_tokens, a.cost, a.unpriced_calls
FROM rollouts r LEFT JOIN attempts a ON a.rollout = r.seq AND a.attempt_id = :attempt_id
WHERE r.rollout_id = :rollout_id

-- name: get_span_counters
-- A rollout with each of its attempts (NULLs if it has none) and the highest span number of each,
-- which is about how many spans it has.
SELECT r.seq, r.attempts, a.sequence_id, a.attempt_id, a.last_span
FROM rollouts r LEFT JOIN attempts a ON a.rollout = r.seq WHERE r.rollout_id = :rollout_id

-- name: select_span_ids
-- The ids of spans. Filters follow.
SELECT s.span_id FROM spans s

-- name: insert_span_row
-- No query: insert a span. Values are in the order of `rows.span_values`.
INSERT INTO spans (rollout, attempt, sequence_id, span_id, trace_id, parent_id, name, kind, status_code,
                   status_description, start_time, end_time, tokens_base, tokens, attributes, events, resource)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: insert_span
-- Add a span, unless the attempt has it already.
{insert_span_row}
ON CONFLICT (rollout, attempt, span_id) DO NOTHING

-- name: draw_span_sequence
-- Advance the attempt's counter of spans.
UPDATE attempts SET last_span = :last_span WHERE rollout = :rollout AND sequence_id = :sequence_id

-- name: count_late_spans
-- Add the number and the size of late spans to an attempt that is over.
UPDATE attempts SET last_span = :last_span, bytes = bytes + :bytes, spans = spans + :spans WHERE rollout = :rollout AND sequence_id = :sequence_id

-- name: beat_heart
-- Add spans to a running attempt, which is also a heartbeat. Values: the counter, more bytes, more
-- spans, the time; the rollout, the attempt's number.
UPDATE attempts SET last_span = ?, bytes = bytes + ?, spans = spans + ?, last_heartbeat_time = ?
WHERE rollout = ? AND sequence_id = ?

-- name: run_attempt
-- Add spans to an attempt that was preparing or unresponsive, and set it running.
UPDATE attempts SET last_span = :last_span, bytes = bytes + :bytes, spans = spans + :spans, last_heartbeat_time = :now, status = :status
WHERE rollout = :rollout AND sequence_id = :sequence_id

-- name: select_spans
-- The spans of a rollout. The page's filters follow.
SELECT {span_columns}
FROM spans s

-- name: select_all_spans
-- The spans of a rollout, by the id that its caller knows.
{select_spans} WHERE s.rollout = (SELECT seq FROM rollouts WHERE rollout_id = :rollout_id)

-- name: get_token_record
-- The token record of one span of an attempt, in the order of `select_spans`; no row if it has
-- none.
SELECT s.key, s.tokens_base, s.tokens FROM spans s
WHERE s.rollout = :rollout AND s.attempt = :attempt AND s.span_id = :span_id AND s.tokens IS NOT NULL

-- name: select_token_chain
-- A token record, its base (the record that it begins with), the base of that one, and so on.
WITH RECURSIVE chain (key, tokens_base, tokens) AS (
    SELECT key, tokens_base, tokens FROM spans WHERE key = :key
    UNION ALL
    SELECT s.key, s.tokens_base, s.tokens FROM chain JOIN spans s ON s.key = chain.tokens_base
)
SELECT key, tokens_base, tokens FROM chain

-- name: select_spans_of_all
-- Spans of any rollouts, with the ids of rollout and attempt. A filter follows.
SELECT {span_columns}, r.rollout_id, a.attempt_id
FROM spans s JOIN rollouts r ON r.seq = s.rollout JOIN attempts a ON a.rollout = s.rollout AND a.sequence_id = s.attempt

-- name: select_spans_of_latest
-- Spans of the latest attempts of rollouts, in any order; NULLs for an attempt without spans. A
-- filter follows.
SELECT {span_columns}, r.rollout_id, a.attempt_id
FROM rollouts r LEFT JOIN attempts a ON a.rollout = r.seq AND a.sequence_id = r.attempts
                LEFT JOIN spans s ON s.rollout = r.seq AND s.attempt = r.attempts

-- name: select_spans_at
-- The spans whose keys are in a JSON list, in any order.
{select_spans_of_all} WHERE s.key IN (SELECT value FROM json_each(:keys))

-- name: select_span_keys
-- The keys of spans. The page's filters follow.
SELECT s.key FROM spans s

-- name: select_new_positions
-- The positions of spans after a cursor, up to a last one. A position has two numbers; in SQLite
-- both are the key, because keys are in the order of commits. The page's filters follow.
SELECT s.key, s.key FROM spans s WHERE s.key > :key AND s.key <= :last_key

-- name: get_last_span
-- The position of the last span that may be shown, because no later commit can precede it, and the
-- first number of a cursor that is read now.
SELECT key, key, :txid FROM spans ORDER BY key DESC LIMIT 1

-- name: get_highest_key
-- The highest key. No span, and so no cursor, has ever had a higher one.
SELECT coalesce(max(key), 0) FROM spans

-- name: await_span_writers
-- Wait for transactions that add spans and do not see a new attribute index yet. SQLite has one
-- writer at a time; PostgreSQL locks the table against writers.
SELECT 1

-- name: insert_attribute_index
-- Begin the index of an attribute. Spans up to `until` are still to be indexed.
INSERT INTO attribute_indexes (attribute, done, until) SELECT :attribute, 0, coalesce(max(key), 0) FROM spans WHERE true
ON CONFLICT (attribute) DO NOTHING

-- name: get_attribute_index
-- The number of an indexed attribute, and how far its older spans have been indexed.
SELECT id, done, until FROM attribute_indexes WHERE attribute = :attribute

-- name: set_attribute_indexed
-- Record that more of an attribute's older spans have been indexed.
UPDATE attribute_indexes SET done = :done WHERE id = :id AND done < :done

-- name: select_attribute_indexes
-- All indexed attributes.
SELECT id, attribute FROM attribute_indexes

-- name: select_attributes
-- The attributes of the spans between two keys.
SELECT key, attributes FROM spans WHERE key > :after AND key <= :until AND attributes <> '' ORDER BY key

-- name: insert_attribute_value
-- Add a value of a span to the index of an attribute.
INSERT INTO attribute_values (attribute, value, span) VALUES (:attribute, :value, :span) ON CONFLICT DO NOTHING

-- name: insert_attribute_value_of
-- Add a value of a span that was just inserted to the index of an attribute.
INSERT INTO attribute_values (attribute, value, span)
SELECT :attribute, :value, key FROM spans WHERE rollout = :rollout AND attempt = :attempt AND span_id = :span_id

-- name: count_spans_of
-- Count spans. The page's filters follow.
SELECT count(*) FROM spans s

-- name: resources_columns
-- No query: the columns of a version of resources.
s.resources_id, s.version, s.create_time, s.update_time, s.resources, s.parent_id, s.parent_version, s.author,
s.frozen

-- name: get_latest_resources
-- The resources that were written last.
SELECT {resources_columns} FROM resources s ORDER BY s.key DESC LIMIT 1

-- name: get_latest_resources_version
-- The id and the version of the resources that were written last.
SELECT resources_id, version FROM resources ORDER BY key DESC LIMIT 1

-- name: get_resources
-- The newest version under an id.
SELECT {resources_columns} FROM resources s
WHERE s.resources_id = :resources_id ORDER BY s.version DESC LIMIT 1

-- name: get_version
-- One version under an id.
SELECT {resources_columns} FROM resources s WHERE s.resources_id = :resources_id AND s.version = :version

-- name: has_version
-- Whether a version exists. Neither writes nor deletions of versions may run at the same time.
SELECT 1 FROM resources WHERE resources_id = :resources_id AND version = :version

-- name: get_newest_version
-- The number of the newest version under an id; no row if there is none.
SELECT version FROM resources WHERE resources_id = :resources_id ORDER BY version DESC LIMIT 1

-- name: insert_resources
-- Add a version, which becomes the latest of all.
INSERT INTO resources (resources_id, version, create_time, update_time, resources, parent_id, parent_version, author)
VALUES (:resources_id, :version, :create_time, :update_time, :resources, :parent_id, :parent_version, :author)

-- name: select_resources
-- Versions of resources. The page's filters follow.
SELECT {resources_columns} FROM resources s

-- name: count_resources_of
-- Count versions of resources. The page's filters follow.
SELECT count(*) FROM resources s

-- name: select_prunable
-- The rollouts of a final status that no name pins, oldest first, each with its number of rows.
SELECT r.seq, r.end_time, r.bytes,
       1 + (SELECT count(*) + coalesce(sum(a.spans), 0) FROM attempts a WHERE a.rollout = r.seq)
FROM rollouts r
WHERE r.status = :status AND r.end_time IS NOT NULL AND NOT EXISTS (SELECT 1 FROM pins p WHERE p.rollout = r.seq)
ORDER BY r.end_time, r.seq LIMIT :limit

-- name: newest_rollout
-- The rollout that must be kept, so that the next rollout gets a new number.
SELECT max(seq) FROM rollouts

-- name: rollout_of_newest_span
-- The rollout that must be kept, so that the next span comes after every cursor.
SELECT rollout FROM spans ORDER BY key DESC LIMIT 1

-- name: prune_rollout
-- Delete a rollout, if that is still allowed. Return what the totals subtract, and what late
-- feedback needs.
DELETE FROM rollouts
WHERE seq = :seq AND end_time IS NOT NULL AND NOT EXISTS (SELECT 1 FROM pins p WHERE p.rollout = :seq)
RETURNING rollout_id, resources_id, status, bytes, mode, resources_version, arm, run, group_id

-- name: prune_attempts
-- Delete the attempts of a deleted rollout. Return each one's worker and end.
DELETE FROM attempts WHERE rollout = :seq RETURNING attempt_id, worker_id, end_time

-- name: prune_spans
-- Delete the spans of a deleted rollout.
DELETE FROM spans WHERE rollout = :seq

-- name: prune_resources
-- Delete versions under an id that have no label and that no rollout can have used, because they
-- were replaced before the oldest rollout was enqueued.
DELETE FROM resources WHERE resources_id = :resources_id AND version < (
    SELECT max(s.version) FROM resources s WHERE s.resources_id = :resources_id
       AND s.update_time <= (SELECT r.start_time FROM rollouts r ORDER BY r.seq LIMIT 1))
   AND NOT EXISTS (SELECT 1 FROM labels l WHERE l.resources_id = resources.resources_id AND l.version = resources.version)

-- name: get_labelled
-- The version that has a label.
SELECT {resources_columns} FROM labels l JOIN resources s ON s.resources_id = l.resources_id AND s.version = l.version
WHERE l.label = :label

-- name: select_labels
-- Every label, with its version.
SELECT label, resources_id, version FROM labels ORDER BY label

-- name: put_label
-- Move a label to a version, wherever it was.
INSERT INTO labels (label, resources_id, version) VALUES (:label, :resources_id, :version)
ON CONFLICT (label) DO UPDATE SET resources_id = :resources_id, version = :version

-- name: delete_label
-- Delete a label.
DELETE FROM labels WHERE label = :label

-- name: set_live_request
-- Set the input and the metadata of a live rollout. Its session reports them, because a gateway
-- does not know them.
UPDATE rollouts SET input = :input, metadata = :metadata WHERE rollout_id = :rollout_id

-- name: get_label
-- The version that has a label. No label may move at the same time.
SELECT resources_id, version FROM labels WHERE label = :label

-- name: select_labels_on
-- The labels of one version.
SELECT label FROM labels WHERE resources_id = :resources_id AND version = :version ORDER BY label

-- name: set_frozen
-- Freeze a version (1), or allow it labels again (0).
UPDATE resources SET frozen = :frozen WHERE resources_id = :resources_id AND version = :version

-- name: insert_audit
-- Log one change of a label, a freeze or a release.
INSERT INTO audit (action, time, label, from_id, from_version, to_id, to_version, release_id, state, who, why)
VALUES (:action, :time, :label, :from_id, :from_version, :to_id, :to_version, :release_id, :state, :who, :why)

-- name: select_audit
-- The audit log. The page's filters follow.
SELECT d.key, d.action, d.time, d.label, d.from_id, d.from_version, d.to_id, d.to_version, d.release_id, d.state, d.who, d.why
FROM audit d

-- name: insert_release
-- Add a release, unless it exists.
INSERT INTO releases (release_id, state, from_id, from_version, canary_id, canary_version, details, deadline, create_time, update_time)
VALUES (:release_id, :state, :from_id, :from_version, :canary_id, :canary_version, :details, :deadline, :create_time, :update_time)
ON CONFLICT (release_id) DO NOTHING

-- name: has_released
-- One row if the store has resources, feedback, releases or an audit log.
SELECT 1 WHERE EXISTS (SELECT 1 FROM resources) OR EXISTS (SELECT 1 FROM feedback)
   OR EXISTS (SELECT 1 FROM releases) OR EXISTS (SELECT 1 FROM audit)

-- name: advance_release
-- Move a release from one state to the next. The second of two callers changes nothing.
UPDATE releases SET state = :state, update_time = :now WHERE release_id = :release_id AND state = :expected_state

-- name: set_release
-- Set what else changes when a release moves to another state.
UPDATE releases SET details = :details, deadline = :deadline WHERE release_id = :release_id

-- name: select_releases
-- Releases. The page's filters follow.
SELECT e.release_id, e.state, e.from_id, e.from_version, e.canary_id, e.canary_version, e.details, e.deadline, e.create_time,
       e.update_time
FROM releases e

-- name: get_release
-- One release.
{select_releases} WHERE e.release_id = :release_id

-- name: insert_served
-- Keep what late feedback needs of a live rollout that is deleted.
INSERT INTO served (rollout_id, resources_id, version, arm) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING

-- name: get_served
-- The resources and the arm of a live rollout, from its row, or from what was kept when it was
-- deleted.
SELECT r.resources_id, r.resources_version, r.arm FROM rollouts r WHERE r.rollout_id = :rollout_id
UNION ALL
SELECT v.resources_id, v.version, v.arm FROM served v WHERE v.rollout_id = :rollout_id
LIMIT 1

-- name: insert_feedback
-- Add one opinion. Its id is unique.
INSERT INTO feedback (feedback_id, rollout_id, source, kind, value, given_time, received_time, resources_id, version, arm)
VALUES (:feedback_id, :rollout_id, :source, :kind, :value, :given_time, :received_time, :resources_id, :version, :arm)

-- name: select_feedback
-- Feedback. The page's filters follow.
SELECT f.key, f.feedback_id, f.rollout_id, f.source, f.kind, f.value, f.given_time, f.received_time, f.resources_id, f.version, f.arm
FROM feedback f

-- name: get_feedback
-- One opinion by its id. No other may be added at the same time.
{select_feedback} WHERE f.feedback_id = :feedback_id

-- name: put_endpoint
-- Set the address of a model.
INSERT INTO endpoints (name, base_url, api_key) VALUES (:name, :base_url, :api_key)
ON CONFLICT (name) DO UPDATE SET base_url = :base_url, api_key = :api_key

-- name: get_endpoint
-- The address of a model.
SELECT base_url, api_key FROM endpoints WHERE name = :name

-- name: unpin
-- Remove all pins of a name.
DELETE FROM pins WHERE name = :name

-- name: pin_rollout
-- Pin one more rollout under a name, if the rollout exists.
INSERT INTO pins (rollout, name) SELECT r.seq, :name FROM rollouts r WHERE r.rollout_id = :rollout_id
ON CONFLICT (rollout, name) DO UPDATE SET name = :name

-- name: select_workers
-- Workers. The page's filters follow.
SELECT w.worker_id, w.status, w.heartbeat_stats, w.last_heartbeat_time, w.last_dequeue_time, w.last_busy_time,
       w.last_idle_time, w.current_rollout_id, w.current_attempt_id, w.paused
FROM workers w

-- name: get_worker
-- One worker.
{select_workers} WHERE w.worker_id = :worker_id

-- name: count_workers
-- Count workers. The page's filters follow.
SELECT count(*) FROM workers w

-- name: beat_worker
-- Record a worker's own heartbeat. `keep` is 1 to leave its statistics unchanged.
INSERT INTO workers (worker_id, status, heartbeat_stats, last_heartbeat_time)
VALUES (:worker_id, 'unknown', :heartbeat_stats, :now)
ON CONFLICT (worker_id) DO UPDATE SET last_heartbeat_time = :now,
    heartbeat_stats = CASE WHEN :keep = 1 THEN workers.heartbeat_stats ELSE :heartbeat_stats END

-- name: set_worker_paused
-- Ask a worker not to claim (1), or to claim again (0).
UPDATE workers SET paused = :paused WHERE worker_id = :worker_id

-- name: worker_claimed
-- Record that a worker claimed an attempt.
INSERT INTO workers (worker_id, status, last_dequeue_time, last_busy_time, current_rollout_id, current_attempt_id)
VALUES (:worker_id, 'busy', :now, :now, :rollout_id, :attempt_id)
ON CONFLICT (worker_id) DO UPDATE SET status = 'busy', last_dequeue_time = :now, last_busy_time = :now,
    current_rollout_id = :rollout_id, current_attempt_id = :attempt_id

-- name: worker_found_nothing
-- Record that a worker found the queue empty. It has been idle since it first did.
INSERT INTO workers (worker_id, status, last_dequeue_time, last_idle_time)
VALUES (:worker_id, 'idle', :now, :now)
ON CONFLICT (worker_id) DO UPDATE SET last_dequeue_time = :now,
    last_idle_time = CASE WHEN workers.status = 'idle' THEN workers.last_idle_time ELSE :now END,
    status = 'idle', current_rollout_id = NULL, current_attempt_id = NULL

-- name: worker_busy
-- Record that a worker has an attempt that it did not get from the queue.
INSERT INTO workers (worker_id, status, last_busy_time, current_rollout_id, current_attempt_id)
VALUES (:worker_id, 'busy', :now, :rollout_id, :attempt_id)
ON CONFLICT (worker_id) DO UPDATE SET status = 'busy', last_busy_time = :now,
    current_rollout_id = :rollout_id, current_attempt_id = :attempt_id

-- name: worker_freed
-- Record that a worker's attempt is over (`idle`) or silent (`unknown`), unless the worker has
-- another attempt by now.
UPDATE workers SET last_idle_time = :now, status = :status, current_rollout_id = NULL, current_attempt_id = NULL
WHERE worker_id = :worker_id AND current_rollout_id = :rollout_id AND current_attempt_id = :attempt_id

-- name: worker_revived
-- Record that a worker that was taken for lost reported from its attempt, unless it has another
-- attempt by now.
UPDATE workers SET last_busy_time = :now, status = 'busy', current_rollout_id = :rollout_id,
    current_attempt_id = :attempt_id
WHERE worker_id = :worker_id AND status = 'unknown' AND current_attempt_id IS NULL

-- name: insert_sample
-- Add a value to a time series, unless the series has one at that time. The worker '' stands for
-- none.
INSERT INTO samples (name, worker_id, time, value) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING

-- name: prune_samples
-- Of the oldest `limit` samples, delete those that are too old or too many.
DELETE FROM samples WHERE key IN (SELECT key FROM samples ORDER BY key LIMIT :limit)
  AND (time < :oldest OR key <= (SELECT max(key) FROM samples) - :most)

-- name: select_samples
-- Samples. The page's filters follow.
SELECT s.name, s.time, s.value, s.worker_id FROM samples s

-- name: select_runs
-- Runs. The page's filters follow.
SELECT u.key, u.run_id, u.name, u.kind, u.status, u.start_time, u.end_time, u.last_heartbeat_time, u.cause, u.config
FROM runs u

-- name: get_run
-- One run. PostgreSQL locks it if the operation writes.
{select_runs} WHERE u.run_id = :run_id

-- name: get_run_key
-- The number of a run, by which rollouts and metrics refer to it.
SELECT key FROM runs WHERE run_id = :run_id

-- name: insert_run
-- Add a run, which has just begun.
INSERT INTO runs (run_id, name, kind, status, start_time, last_heartbeat_time, config)
VALUES (:run_id, :name, :kind, 'running', :start_time, :now, :config)

-- name: resume_run
-- Resume a run, perhaps with another name and configuration.
UPDATE runs SET name = :name, status = 'running', end_time = NULL, last_heartbeat_time = :now, cause = NULL, config = :config
WHERE run_id = :run_id

-- name: set_run
-- Set everything of a run that may change while it runs.
UPDATE runs SET status = :status, end_time = :end_time, last_heartbeat_time = :now, cause = :cause, config = :config
WHERE key = :key

-- name: put_metric
-- Set a metric of a run, replacing an earlier value. Values: the run, iteration, stage, name;
-- value, time.
INSERT INTO metrics (run, iteration, stage, name, value, time) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (run, iteration, stage, name) DO UPDATE SET value = excluded.value, time = excluded.time

-- name: select_metrics
-- Metrics. The page's filters follow.
SELECT m.stage, m.iteration, m.name, m.value, m.time FROM metrics m

-- name: cut_metrics
-- Delete the metrics of a run after an iteration.
DELETE FROM metrics WHERE run = :run AND iteration > :after_iteration
