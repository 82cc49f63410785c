-- Rollouts, attempts, spans, resources and workers: the tables of SQLite's `0001_initial.sql`, where each column is explained.
-- Text that is compared or sorted has the collation "C", which is SQLite's order. Tables whose rows change often leave room
-- in their pages, so that a heartbeat touches no index.

CREATE FUNCTION instr(text, text) RETURNS int LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN strpos($1, $2);               -- SQLite's name for it, so that filters are written once

CREATE TABLE rollouts (
    seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rollout_id TEXT COLLATE "C" NOT NULL UNIQUE,
    status TEXT COLLATE "C" NOT NULL,
    mode TEXT COLLATE "C",
    priority INTEGER NOT NULL DEFAULT 0,
    resources_id TEXT COLLATE "C",
    input TEXT NOT NULL,
    config TEXT NOT NULL,
    metadata TEXT NOT NULL,
    start_time DOUBLE PRECISION NOT NULL,
    end_time DOUBLE PRECISION,
    bytes BIGINT NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    interrupted INTEGER NOT NULL DEFAULT 0,
    timeout_seconds DOUBLE PRECISION,
    unresponsive_seconds DOUBLE PRECISION
) WITH (fillfactor = 80);
CREATE INDEX rollouts_queue ON rollouts ((seq - priority * 1000), seq) WHERE status IN ('queuing', 'requeuing');
CREATE INDEX rollouts_status ON rollouts (status);
CREATE INDEX rollouts_finished ON rollouts (end_time, seq, bytes) WHERE end_time IS NOT NULL;

CREATE TABLE attempts (
    rollout BIGINT NOT NULL,
    sequence_id INTEGER NOT NULL,
    attempt_id TEXT COLLATE "C" NOT NULL,
    status TEXT COLLATE "C" NOT NULL,
    worker_id TEXT COLLATE "C",
    claim_id TEXT COLLATE "C",
    answered INTEGER NOT NULL DEFAULT 1,
    start_time DOUBLE PRECISION NOT NULL,
    end_time DOUBLE PRECISION,
    last_heartbeat_time DOUBLE PRECISION,
    metadata TEXT NOT NULL DEFAULT '',
    last_span BIGINT NOT NULL DEFAULT 0,
    bytes BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (rollout, sequence_id)
) WITH (fillfactor = 70);
CREATE INDEX attempts_claim ON attempts (claim_id) WHERE claim_id IS NOT NULL;
CREATE INDEX attempts_unfinished ON attempts (start_time) WHERE end_time IS NULL;

CREATE TABLE spans (
    key BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- The transaction that wrote it. Keys are drawn before the commit, so arrival is (txid, key), of transactions older
    -- than any that is still under way.
    txid BIGINT NOT NULL DEFAULT (pg_current_xact_id()::text::bigint),
    rollout BIGINT NOT NULL,
    attempt INTEGER NOT NULL,
    sequence_id BIGINT NOT NULL,
    span_id TEXT COLLATE "C" NOT NULL,
    trace_id TEXT COLLATE "C" NOT NULL,
    parent_id TEXT COLLATE "C",
    name TEXT COLLATE "C" NOT NULL,
    kind TEXT COLLATE "C" NOT NULL,
    status_code TEXT COLLATE "C" NOT NULL,
    status_description TEXT COLLATE "C",
    start_time DOUBLE PRECISION,
    end_time DOUBLE PRECISION,
    tokens_base BIGINT,
    tokens BYTEA,
    attributes TEXT NOT NULL,
    events TEXT NOT NULL,
    resource TEXT NOT NULL
);
CREATE UNIQUE INDEX spans_of_attempt ON spans (rollout, attempt, span_id);
CREATE INDEX spans_arrival ON spans (txid, key);
CREATE INDEX spans_name ON spans (name, start_time);
CREATE INDEX spans_with_tokens ON spans (rollout, attempt, key) WHERE tokens IS NOT NULL;

CREATE VIEW span_names (name) AS
WITH RECURSIVE names (name) AS (
    SELECT min(name) FROM spans
    UNION ALL
    SELECT (SELECT min(s.name) FROM spans s WHERE s.name > names.name) FROM names WHERE names.name IS NOT NULL
)
SELECT name FROM names WHERE name IS NOT NULL;

CREATE TABLE attribute_indexes (
    id INTEGER GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    attribute TEXT COLLATE "C" NOT NULL UNIQUE,
    done BIGINT NOT NULL,
    until BIGINT NOT NULL
);
CREATE TABLE attribute_values (
    attribute INTEGER NOT NULL,
    value BYTEA NOT NULL,
    span BIGINT NOT NULL,
    PRIMARY KEY (attribute, value, span)
);
CREATE INDEX attribute_values_of_span ON attribute_values (span);
CREATE FUNCTION forget_attribute_values() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM attribute_values WHERE span IN (SELECT key FROM gone);
    RETURN NULL;
END $$;
CREATE TRIGGER spans_forgotten AFTER DELETE ON spans REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION forget_attribute_values();

CREATE TABLE pins (
    rollout BIGINT NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (rollout, name)
);
CREATE INDEX pins_name ON pins (name);

CREATE TABLE resources (
    key BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    resources_id TEXT COLLATE "C" NOT NULL,
    version INTEGER NOT NULL,
    create_time DOUBLE PRECISION NOT NULL,
    update_time DOUBLE PRECISION NOT NULL,
    resources TEXT NOT NULL,
    UNIQUE (resources_id, version)
);

CREATE TABLE workers (
    worker_id TEXT COLLATE "C" PRIMARY KEY,
    status TEXT COLLATE "C" NOT NULL,
    heartbeat_stats TEXT,
    last_heartbeat_time DOUBLE PRECISION,
    last_dequeue_time DOUBLE PRECISION,
    last_busy_time DOUBLE PRECISION,
    last_idle_time DOUBLE PRECISION,
    current_rollout_id TEXT COLLATE "C",
    current_attempt_id TEXT COLLATE "C"
) WITH (fillfactor = 70);

-- Connections that write, and how many of their transactions were committed: what `pg_xact_status` would tell of a transaction
-- whose connection broke during the commit, had a crashed server not given its number to another one meanwhile.
CREATE TABLE connections (
    connection BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    commits BIGINT NOT NULL DEFAULT 0,
    fenced BOOLEAN NOT NULL DEFAULT false, -- somebody has concluded from `commits`: it must not change any more
    last_commit TIMESTAMPTZ NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

CREATE FUNCTION count_commit(of_connection bigint, number bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE connections SET commits = number, last_commit = now() WHERE connection = of_connection AND NOT fenced;
    IF NOT FOUND THEN
        RAISE SQLSTATE 'LY001' USING MESSAGE = 'this connection may not commit any more';
    END IF;
END $$;
