-- Where a version of resources comes from, labels, and where models listen: see SQLite's `0007_versions.sql`.

ALTER TABLE resources
    ADD COLUMN parent_id TEXT COLLATE "C",
    ADD COLUMN parent_version BIGINT,
    ADD COLUMN author TEXT COLLATE "C";

CREATE TABLE labels (
    label TEXT COLLATE "C" PRIMARY KEY,
    resources_id TEXT COLLATE "C" NOT NULL,
    version BIGINT NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX labels_version ON labels (resources_id, version);

CREATE TABLE endpoints (
    name TEXT COLLATE "C" PRIMARY KEY,
    base_url TEXT NOT NULL,
    api_key TEXT
);
