-- A sent row remembers when its feed first spoke of it, so that passes needn't look for the events of each control. It is
-- written with the row's outcome; NULL says that nobody noted it, not that nothing was heard: then the events tell.
ALTER TABLE send_log ADD COLUMN heard_at timestamptz;

-- Whether it is the feed's own voice: not the sender's answer, nor what was looked up.
CREATE FUNCTION is_feeds_voice(source text) RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT source IN ('http', 'sqs', 'replay', 'back-fill')
$$;

CREATE OR REPLACE VIEW feed_event AS
SELECT wire_key, feed, received_at, partition_at FROM provider_event WHERE is_feeds_voice(source);

CREATE OR REPLACE VIEW control AS
SELECT wire_key, feed, first_claimed_at, message_class, recipient_domain(recipient_key) AS domain, heard_at FROM send_log
WHERE answered_at IS NOT NULL AND attempt = 1 AND (recipient IS NULL OR recipient_key IS NOT NULL);
