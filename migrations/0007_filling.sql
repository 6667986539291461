-- While a replay or a back-fill of a feed runs, its silence means nothing: a lease, renewed while it runs.
ALTER TABLE feed_state ADD COLUMN filling_until timestamptz;

-- How far back-fills have come, so that one that was broken off goes on where it was.
CREATE TABLE backfill (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    feed text NOT NULL,
    asked text NOT NULL,                        -- where: another place is another span
    since timestamptz NOT NULL,
    until timestamptz NOT NULL CHECK (until > since),
    done_until timestamptz NOT NULL,
    events bigint NOT NULL DEFAULT 0,
    stored bigint NOT NULL DEFAULT 0,
    who text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at timestamptz
);
CREATE INDEX backfill_unfinished ON backfill (feed) WHERE ended_at IS NULL;

-- What the daily look at a feed's webhook found at its provider.
ALTER TABLE feed_state ADD COLUMN endpoint_checked_at timestamptz;
ALTER TABLE feed_state ADD COLUMN endpoint_finding text;

-- What a process can't do and a person should know, by the host that it runs on; old ones are a dead process's.
CREATE TABLE finding (
    code text NOT NULL,
    host text NOT NULL,
    text text NOT NULL,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (code, host)
);
