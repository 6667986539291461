-- What providers said, partitioned by month. The receiver writes it and nothing else of the ledger.

CREATE TABLE provider_event (
    feed text NOT NULL,
    message_id text NOT NULL,                   -- '~' and the event id where the event belongs to no message
    event_id text NOT NULL,
    partition_at timestamptz NOT NULL,          -- occurred_at where a partition for it exists, else 1970-01-01
    occurred_at timestamptz,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    wire_key text NOT NULL,                     -- '~' and a hash of feed and message id where the event has no key
    kind text NOT NULL,
    testimony text NOT NULL CHECK (testimony IN ('accepted', 'rejected', 'none')),
    recipient text,
    reason text,
    source text NOT NULL CHECK (source IN ('http', 'sqs', 'replay', 'back-fill', 'look-up', 'sender')),
    attempt int,
    fence bigint,
    raw bytea NOT NULL DEFAULT '',
    PRIMARY KEY (wire_key, message_id, event_id, feed, partition_at),
    CONSTRAINT answers_name_their_claim CHECK ((source = 'sender') = (fence IS NOT NULL))
) PARTITION BY RANGE (partition_at);

CREATE INDEX provider_event_received ON provider_event USING brin (received_at) WITH (autosummarize = on);

CREATE TABLE provider_event_undated PARTITION OF provider_event
    FOR VALUES FROM ('1970-01-01 00:00:00+00') TO ('1970-01-02 00:00:00+00');

-- Makes the partitions of last month, this month and the months ahead; returns the names of those it made.
-- CREATE and ATTACH, never PARTITION OF, which would lock out every reader and writer of the parent.
CREATE FUNCTION provider_event_make_partitions(ahead int DEFAULT 2) RETURNS SETOF text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET timezone = 'UTC' AS $$
#variable_conflict use_column
DECLARE
    first_day timestamptz;
    part text;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended(current_schema() || '.provider_event', 0)) THEN
        RETURN;  -- somebody else is making them
    END IF;
    FOR first_day IN
        SELECT date_trunc('month', clock_timestamp()) + n * interval '1 month' FROM generate_series(-1, ahead) AS n
    LOOP
        part := 'provider_event_' || to_char(first_day, 'YYYYMM');
        CONTINUE WHEN to_regclass(part) IS NOT NULL;
        EXECUTE format('CREATE TABLE %I (LIKE provider_event INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', part);
        EXECUTE format('ALTER TABLE provider_event ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
            part, first_day, first_day + interval '1 month');
        RETURN NEXT part;
    END LOOP;
END $$;

-- The months that have a partition, as their first days.
CREATE FUNCTION provider_event_months() RETURNS SETOF date
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT to_date(right(relname, 6), 'YYYYMM')
    FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
    WHERE inhparent = 'provider_event'::regclass AND relname ~ '^provider_event_[0-9]{6}$'
    ORDER BY 1
$$;

SELECT provider_event_make_partitions();

-- What the receiver took and refused, a row a feed, minute and outcome. Flushed every few seconds: no hot row.
CREATE TABLE feed_delivery (
    feed text NOT NULL,
    minute timestamptz NOT NULL,
    outcome text NOT NULL,                      -- stored, control, damaged, refused:<reason> or later:<reason>
    n bigint NOT NULL,
    last_at timestamptz NOT NULL,
    PRIMARY KEY (feed, minute, outcome)
);
