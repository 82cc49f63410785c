-- Serving: feedback, frozen versions, the audit log of labels, and releases: see SQLite's `0008_serving.sql`.

ALTER TABLE resources ADD COLUMN frozen BIGINT NOT NULL DEFAULT 0;

CREATE TABLE feedback (
    key BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    feedback_id TEXT COLLATE "C" NOT NULL UNIQUE,
    rollout_id TEXT COLLATE "C" NOT NULL,
    source TEXT COLLATE "C" NOT NULL,
    kind TEXT COLLATE "C" NOT NULL,
    value TEXT NOT NULL,
    given_time DOUBLE PRECISION,
    received_time DOUBLE PRECISION NOT NULL,
    resources_id TEXT COLLATE "C",
    version BIGINT,
    arm TEXT COLLATE "C"
);
CREATE INDEX feedback_rollout ON feedback (rollout_id, source, kind, key);
CREATE INDEX feedback_version ON feedback (resources_id, version, key);

CREATE TABLE served (
    rollout_id TEXT COLLATE "C" PRIMARY KEY,
    resources_id TEXT COLLATE "C" NOT NULL,
    version BIGINT NOT NULL,
    arm TEXT COLLATE "C"
);

CREATE TABLE audit (
    key BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    action TEXT COLLATE "C" NOT NULL,
    time DOUBLE PRECISION NOT NULL,
    label TEXT COLLATE "C",
    from_id TEXT COLLATE "C",
    from_version BIGINT,
    to_id TEXT COLLATE "C",
    to_version BIGINT,
    release_id TEXT COLLATE "C",
    state TEXT COLLATE "C",
    who TEXT,
    why TEXT
);

CREATE TABLE releases (
    key BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    release_id TEXT COLLATE "C" NOT NULL UNIQUE,
    state TEXT COLLATE "C" NOT NULL,
    from_id TEXT COLLATE "C",
    from_version BIGINT,
    canary_id TEXT COLLATE "C" NOT NULL,
    canary_version BIGINT NOT NULL,
    details TEXT NOT NULL,
    deadline DOUBLE PRECISION,
    create_time DOUBLE PRECISION NOT NULL,
    update_time DOUBLE PRECISION NOT NULL
);
