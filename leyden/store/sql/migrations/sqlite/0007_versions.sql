-- Where a version of resources comes from, labels that move between versions, and where models listen.

ALTER TABLE resources ADD COLUMN parent_id TEXT;         -- with parent_version: the version that it was made from; NULL: none
ALTER TABLE resources ADD COLUMN parent_version INTEGER;
ALTER TABLE resources ADD COLUMN author TEXT;            -- who wrote it, as the writer says; NULL: not said

CREATE TABLE labels (
    label TEXT PRIMARY KEY,
    resources_id TEXT NOT NULL,
    version INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX labels_version ON labels (resources_id, version);

CREATE TABLE endpoints (
    name TEXT PRIMARY KEY,               -- resources say `gateway://name`
    base_url TEXT NOT NULL,
    api_key TEXT                         -- NULL: none
) WITHOUT ROWID;
