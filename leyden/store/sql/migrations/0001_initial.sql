-- Rollouts, attempts, spans, resources and workers.
-- `status` is the queue: a rollout that is 'queuing' or 'requeuing' waits to be claimed, oldest `seq` first.

CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY,             -- the order of arrival, and the place in the queue
    rollout_id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    mode TEXT,
    resources_id TEXT,
    input TEXT NOT NULL,                 -- JSON
    config TEXT NOT NULL,                -- JSON; '': all defaults
    metadata TEXT NOT NULL,              -- JSON; '': empty (binding NULL is slower)
    start_time REAL NOT NULL,
    end_time REAL,
    attempts INTEGER NOT NULL DEFAULT 0, -- how many were made: the latest one's sequence_id
    interrupted INTEGER NOT NULL DEFAULT 0, -- how many of them ended with their process, and do not count
    timeout_seconds REAL,                -- of the config, where the sweep finds them
    unresponsive_seconds REAL
);
CREATE INDEX rollouts_queue ON rollouts (seq) WHERE status IN ('queuing', 'requeuing');
CREATE INDEX rollouts_status ON rollouts (status);

CREATE TABLE attempts (
    rollout INTEGER NOT NULL,            -- rollouts.seq
    sequence_id INTEGER NOT NULL,
    attempt_id TEXT NOT NULL,
    status TEXT NOT NULL,
    worker_id TEXT,
    start_time REAL NOT NULL,
    end_time REAL,                       -- NULL: unfinished
    last_heartbeat_time REAL,
    metadata TEXT NOT NULL DEFAULT '',   -- JSON; '': empty
    last_span INTEGER NOT NULL DEFAULT 0, -- the highest span sequence id drawn
    PRIMARY KEY (rollout, sequence_id)
) WITHOUT ROWID;
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
    status_code TEXT NOT NULL,
    status_description TEXT,
    start_time REAL,
    end_time REAL,
    attributes TEXT NOT NULL,            -- JSON; '': empty, as for the next two
    events TEXT NOT NULL,
    resource TEXT NOT NULL,
    tokens BLOB                          -- TokenRecord.pack()
);
CREATE UNIQUE INDEX spans_of_attempt ON spans (rollout, attempt, span_id);

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
