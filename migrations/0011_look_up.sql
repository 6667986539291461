-- Questions to providers' APIs about single sends. A question takes its place in its feed's budget by its row, which is
-- there before the provider is called; what was answered, and when a feed or a send is to be left alone, is read here.
CREATE TABLE look_up (
    id bigint GENERATED ALWAYS AS IDENTITY,
    wire_key text NOT NULL,
    feed text NOT NULL,                         -- whose provider was asked: an attempt may have gone to another one
    asked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    who text NOT NULL,
    answered_at timestamptz,
    answer text CHECK (answer IN ('accepted', 'rejected', 'absent', 'silent')),  -- NULL: none came (yet)
    reason text NOT NULL DEFAULT '',            -- why it is silent
    CONSTRAINT answer_has_its_time CHECK ((answer IS NULL) = (answered_at IS NULL)),
    PRIMARY KEY (wire_key, id)
);
CREATE INDEX look_up_asked ON look_up (feed, asked_at);

-- Why a feed's API is left alone now, or NULL: five minutes where it refuses our credential, one where it is busy or ill.
-- Of one who asked longer than ten minutes ago nobody waits for the answer any more.
CREATE FUNCTION look_up_rest(asked_feed text) RETURNS text
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT l.reason FROM look_up l
    WHERE l.feed = asked_feed AND l.asked_at > statement_timestamp() - interval '10 minutes'
      AND l.answered_at > statement_timestamp()
          - CASE WHEN l.reason IN ('unauthorized', 'forbidden') THEN interval '5 minutes'
                 WHEN l.reason IN ('rate_limited', 'timeout', 'unreachable', 'server_error') THEN interval '1 minute'
            END
    ORDER BY l.answered_at DESC LIMIT 1
$$;
