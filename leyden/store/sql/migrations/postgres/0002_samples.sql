-- Time series, and workers that are asked not to claim: see SQLite's `0002_samples.sql`.

CREATE TABLE samples (
    key BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name TEXT COLLATE "C" NOT NULL,
    worker_id TEXT COLLATE "C" NOT NULL,
    time DOUBLE PRECISION NOT NULL,
    value DOUBLE PRECISION NOT NULL,
    UNIQUE (name, time, worker_id)
);
CREATE INDEX samples_time ON samples (time);

ALTER TABLE workers ADD COLUMN paused INTEGER NOT NULL DEFAULT 0;
