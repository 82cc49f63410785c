-- Serving: feedback, frozen versions, the audit log of labels, and releases.

ALTER TABLE resources ADD COLUMN frozen INTEGER NOT NULL DEFAULT 0; -- 1: no label may be put on this version

CREATE TABLE feedback (
    key INTEGER PRIMARY KEY,             -- the order of arrival
    feedback_id TEXT NOT NULL UNIQUE,
    rollout_id TEXT NOT NULL,            -- the rollout may be forgotten; its feedback stays
    source TEXT NOT NULL,
    kind TEXT NOT NULL,                  -- reward, label, correction
    value TEXT NOT NULL,                 -- JSON
    given_time REAL,                     -- by the caller's clock
    received_time REAL NOT NULL,
    resources_id TEXT,                   -- with version and arm: what the rollout ran with
    version INTEGER,
    arm TEXT
);
CREATE INDEX feedback_rollout ON feedback (rollout_id, source, kind, key);
CREATE INDEX feedback_version ON feedback (resources_id, version, key);

CREATE TABLE served (                    -- live rollouts that retention has forgotten, so that late feedback finds its version
    rollout_id TEXT PRIMARY KEY,
    resources_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    arm TEXT
) WITHOUT ROWID;

CREATE TABLE audit (
    key INTEGER PRIMARY KEY,
    action TEXT NOT NULL,                -- set_label, remove_label, freeze, unfreeze, release
    time REAL NOT NULL,
    label TEXT,
    from_id TEXT,
    from_version INTEGER,
    to_id TEXT,
    to_version INTEGER,
    release_id TEXT,
    state TEXT,                          -- of the release, for the action release
    who TEXT,
    why TEXT
);

CREATE TABLE releases (
    key INTEGER PRIMARY KEY,
    release_id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,
    from_id TEXT,
    from_version INTEGER,
    canary_id TEXT NOT NULL,
    canary_version INTEGER NOT NULL,
    details TEXT NOT NULL,               -- JSON; '' is {}
    deadline REAL,
    create_time REAL NOT NULL,
    update_time REAL NOT NULL
);
