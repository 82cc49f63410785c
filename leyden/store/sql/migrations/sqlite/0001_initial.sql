-- Rollouts, attempts, spans, resources and workers.
-- `status` is the queue: a rollout that is 'queuing' or 'requeuing' waits to be claimed, by priority and age.

CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY,             -- the order of arrival, and the place in the queue
    rollout_id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    mode TEXT,
    priority INTEGER NOT NULL DEFAULT 0,
    resources_id TEXT,
    input TEXT NOT NULL,                 -- JSON
    config TEXT NOT NULL,                -- JSON; '': all defaults
    metadata TEXT NOT NULL,              -- JSON; '': empty (binding NULL is slower)
    start_time REAL NOT NULL,
    end_time REAL,                       -- NULL: unfinished
    bytes INTEGER NOT NULL DEFAULT 0,    -- about how much it takes with all that belongs to it; 0 until it is finished
    attempts INTEGER NOT NULL DEFAULT 0, -- how many were made: the latest one's sequence_id
    interrupted INTEGER NOT NULL DEFAULT 0, -- how many of them ended with their process, and do not count
    timeout_seconds REAL,                -- of the config, where the sweep finds them
    unresponsive_seconds REAL
);
-- 1000 is `types.OVERTAKES`: how many older rollouts one step of priority goes before.
CREATE INDEX rollouts_queue ON rollouts (seq - priority * 1000, seq) WHERE status IN ('queuing', 'requeuing');
CREATE INDEX rollouts_status ON rollouts (status);
CREATE INDEX rollouts_finished ON rollouts (end_time, seq, bytes) WHERE end_time IS NOT NULL; -- the oldest go first

CREATE TABLE attempts (
    rollout INTEGER NOT NULL,            -- rollouts.seq
    sequence_id INTEGER NOT NULL,
    attempt_id TEXT NOT NULL,
    status TEXT NOT NULL,
    worker_id TEXT,
    claim_id TEXT,                       -- the id of the claim that made it, where the claimer gave one
    answered INTEGER NOT NULL DEFAULT 1, -- how often that claim was answered
    start_time REAL NOT NULL,
    end_time REAL,                       -- NULL: unfinished
    last_heartbeat_time REAL,
    metadata TEXT NOT NULL DEFAULT '',   -- JSON; '': empty
    last_span INTEGER NOT NULL DEFAULT 0, -- the highest span sequence id drawn
    bytes INTEGER NOT NULL DEFAULT 0,    -- about how much its spans take
    PRIMARY KEY (rollout, sequence_id)
) WITHOUT ROWID;
CREATE INDEX attempts_claim ON attempts (claim_id) WHERE claim_id IS NOT NULL;
CREATE INDEX attempts_unfinished ON attempts (start_time) WHERE end_time IS NULL; -- IN would cost each update 20 us

CREATE TABLE spans (
    key INTEGER PRIMARY KEY,             -- the order of arrival
    rollout INTEGER NOT NULL,            -- rollouts.seq
    attempt INTEGER NOT NULL,            -- attempts.sequence_id
    sequence_id INTEGER NOT NULL,
    span_id TEXT NOT NULL,
    trace_id TEXT NOT NULL,
    parent_id TEXT,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    status_code TEXT NOT NULL,
    status_description TEXT,
    start_time REAL,
    end_time REAL,
    tokens_base INTEGER,                 -- spans.key of the record that this one's prompt begins with
    tokens BLOB,                         -- TokenRecord.pack(), without what it shares with that
    attributes TEXT NOT NULL,            -- JSON; '': empty, as for the next two
    events TEXT NOT NULL,
    resource TEXT NOT NULL
);
CREATE UNIQUE INDEX spans_of_attempt ON spans (rollout, attempt, span_id);
CREATE INDEX spans_name ON spans (name, start_time);
CREATE INDEX spans_with_tokens ON spans (rollout, attempt) WHERE tokens IS NOT NULL;

-- The names there are, each found behind the one before. One index serves names and times: every index costs each insert 5 us.
CREATE VIEW span_names (name) AS
WITH RECURSIVE names (name) AS (
    SELECT min(name) FROM spans
    UNION ALL
    SELECT (SELECT min(s.name) FROM spans s WHERE s.name > names.name) FROM names WHERE names.name IS NOT NULL
)
SELECT name FROM names WHERE name IS NOT NULL;

CREATE TABLE attribute_indexes (
    id INTEGER PRIMARY KEY,
    attribute TEXT NOT NULL UNIQUE,      -- spans of all rollouts can be found by it
    done INTEGER NOT NULL,               -- spans.key: the older ones that were looked at
    until INTEGER NOT NULL               -- the last that was there before the index
);
CREATE TABLE attribute_values (
    attribute INTEGER NOT NULL,          -- attribute_indexes.id
    value BLOB NOT NULL,                 -- a digest
    span INTEGER NOT NULL,               -- spans.key
    PRIMARY KEY (attribute, value, span)
) WITHOUT ROWID;
CREATE INDEX attribute_values_of_span ON attribute_values (span);
CREATE TRIGGER spans_forgotten AFTER DELETE ON spans BEGIN
    DELETE FROM attribute_values WHERE span = OLD.key;
END;

CREATE TABLE pins (                      -- rollouts that stay, whatever retention says
    rollout INTEGER NOT NULL,            -- rollouts.seq
    name TEXT NOT NULL,
    PRIMARY KEY (rollout, name)
) WITHOUT ROWID;
CREATE INDEX pins_name ON pins (name);

CREATE TABLE resources (
    key INTEGER PRIMARY KEY,             -- the order of writing: the highest is the latest
    resources_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    create_time REAL NOT NULL,
    update_time REAL NOT NULL,
    resources TEXT NOT NULL,             -- JSON
    UNIQUE (resources_id, version)
);

CREATE TABLE workers (
    worker_id TEXT PRIMARY KEY,
    status TEXT NOT NULL,
    heartbeat_stats TEXT,                -- JSON
    last_heartbeat_time REAL,
    last_dequeue_time REAL,
    last_busy_time REAL,
    last_idle_time REAL,
    current_rollout_id TEXT,
    current_attempt_id TEXT
) WITHOUT ROWID;
