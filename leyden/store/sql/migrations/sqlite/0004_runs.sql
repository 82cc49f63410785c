-- Runs and their metrics, and the run and the group of a rollout.

CREATE TABLE runs (
    key INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    status TEXT NOT NULL,
    start_time REAL NOT NULL,
    end_time REAL,                       -- NULL: running, or its process was killed
    last_heartbeat_time REAL NOT NULL,
    cause TEXT,                          -- why it ended without success
    config TEXT NOT NULL                 -- JSON; '': empty
);
CREATE TABLE metrics (
    run INTEGER NOT NULL,                -- runs.key
    iteration INTEGER NOT NULL,
    stage TEXT NOT NULL,
    name TEXT NOT NULL,
    value REAL,                          -- NULL: it was NaN or infinite
    time REAL NOT NULL,
    PRIMARY KEY (run, iteration, stage, name) -- the order in which they are read
) WITHOUT ROWID;

ALTER TABLE rollouts ADD COLUMN run INTEGER; -- runs.key; NULL: of no run
ALTER TABLE rollouts ADD COLUMN group_id TEXT;
-- Rollouts of one run, or of one group, in the order of arrival; a rollout without them costs nothing here.
CREATE INDEX rollouts_of_run ON rollouts (run) WHERE run IS NOT NULL;
CREATE INDEX rollouts_of_group ON rollouts (group_id) WHERE group_id IS NOT NULL;
