-- A sent row remembers when its feed first spoke of it, so that passes needn't look for the events of each control. It is
-- written with the row's outcome; NULL says that nobody noted it, not that nothing was heard: then the events tell.
-- (Whoever takes events away that should never have been stored sets it to NULL.)
ALTER TABLE send_log ADD COLUMN heard_at timestamptz;

-- Whether the feed said it by itself or was made to repeat it: not the sender's answer, nor what was looked up.
CREATE FUNCTION is_feeds_voice(source text) RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT source IN ('http', 'sqs', 'replay', 'back-fill')
$$;

CREATE OR REPLACE VIEW feed_event AS
SELECT wire_key, feed, received_at, partition_at FROM provider_event WHERE is_feeds_voice(source);

CREATE OR REPLACE VIEW control AS
SELECT wire_key, feed, first_claimed_at, message_class, recipient_domain(recipient_key) AS domain, heard_at FROM send_log
WHERE answered_at IS NOT NULL AND attempt = 1 AND (recipient IS NULL OR recipient_key IS NOT NULL);

-- As in 0004, and when its feed had spoken. What was said of the key before it was claimed is no echo of this send.
CREATE OR REPLACE FUNCTION send_note_delivery(w text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    best CONSTANT float8[] := (SELECT send_outcome(l) FROM send_log l WHERE l.wire_key = w);
BEGIN
    UPDATE send_log l SET delivery = delivery_name(best[1]::int), delivery_at = to_timestamp(best[2]),
        heard_at = coalesce(l.heard_at, (
            SELECT min(e.received_at) FROM provider_event e
            WHERE e.wire_key = w AND e.feed = l.feed AND is_feeds_voice(e.source)
              AND e.received_at >= l.first_claimed_at))
    WHERE l.wire_key = w AND l.state = 'sent' AND best[1] > 0;
END $$;
