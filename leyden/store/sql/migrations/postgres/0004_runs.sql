-- Runs and their metrics, and the run and the group of a rollout: see SQLite's `0004_runs.sql`.

CREATE TABLE runs (
    key BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id TEXT COLLATE "C" NOT NULL UNIQUE,
    name TEXT COLLATE "C" NOT NULL,
    kind TEXT COLLATE "C" NOT NULL,
    status TEXT COLLATE "C" NOT NULL,
    start_time DOUBLE PRECISION NOT NULL,
    end_time DOUBLE PRECISION,
    last_heartbeat_time DOUBLE PRECISION NOT NULL,
    cause TEXT,
    config TEXT NOT NULL
) WITH (fillfactor = 70);
CREATE TABLE metrics (
    run BIGINT NOT NULL,
    iteration BIGINT NOT NULL,
    stage TEXT COLLATE "C" NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    value DOUBLE PRECISION,
    time DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (run, iteration, stage, name)
);

ALTER TABLE rollouts ADD COLUMN run BIGINT;
ALTER TABLE rollouts ADD COLUMN group_id TEXT COLLATE "C";
CREATE INDEX rollouts_of_run ON rollouts (run, seq) WHERE run IS NOT NULL;
CREATE INDEX rollouts_of_group ON rollouts (group_id, seq) WHERE group_id IS NOT NULL;
