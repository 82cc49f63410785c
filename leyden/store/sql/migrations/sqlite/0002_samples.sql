-- Time series, and workers that are asked not to claim.

CREATE TABLE samples (
    key INTEGER PRIMARY KEY,             -- the order of arrival: the lowest go first
    name TEXT NOT NULL,
    worker_id TEXT NOT NULL,             -- '': of no worker
    time REAL NOT NULL,
    value REAL NOT NULL,
    UNIQUE (name, time, worker_id)
);
CREATE INDEX samples_time ON samples (time);

ALTER TABLE workers ADD COLUMN paused INTEGER NOT NULL DEFAULT 0;
