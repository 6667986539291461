-- Sends that were accepted twice (duplicate), or of which two message ids are known, which proves nothing (ids_differ).

CREATE TABLE duplicate (
    wire_key text NOT NULL,
    sort text NOT NULL CHECK (sort IN ('duplicate', 'ids_differ')),
    found_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    feed text NOT NULL,                         -- that of the newest release, or else of the send
    evidence jsonb NOT NULL DEFAULT '{}',       -- "because": two_attempts, two_ids, ids_differ or answer_without_id;
                                                -- "acceptances": what that was concluded from, without addresses
    PRIMARY KEY (wire_key, sort)                -- once each: what was resumed over is not held against the feed again
);
CREATE INDEX duplicate_found ON duplicate (found_at);

-- Only sends that were given out again; they are few.
CREATE INDEX send_log_given_out_again ON send_log (claimed_at, wire_key) WHERE attempt > 1;

-- Up to where events have been looked at for duplicates; kept in the row of all feeds.
ALTER TABLE feed_state ADD COLUMN duplicates_until timestamptz;
