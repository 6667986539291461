-- Sends that were asked for again: under a key that stands for other content, or long after they had been sent. Nothing
-- was sent, which is right for a job that came twice and wrong for a message that should have had a key of its own. A
-- table by itself: a new column and its index would hold up every sender while a big send_log is read.
CREATE TABLE asked_again (
    wire_key text PRIMARY KEY REFERENCES send_log ON DELETE CASCADE,
    n int NOT NULL DEFAULT 1,                   -- how often, at most once a minute
    first_at timestamptz NOT NULL,
    asked_at timestamptz NOT NULL,              -- the last time
    asked_as text NOT NULL CHECK (asked_as IN ('already_sent', 'key_reused'))
);
CREATE INDEX asked_again_at ON asked_again (asked_at);

-- Notes that a send was asked for again, at most once a minute; nobody waits for whoever does so at the same time. The
-- owner's right, so that a sender needs none to a table that came with a migration.
CREATE FUNCTION send_note_asked_again(w text, why text, t timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF EXISTS (SELECT FROM asked_again a WHERE a.wire_key = w AND a.asked_at > t - interval '1 minute') THEN
        RETURN;
    END IF;
    PERFORM FROM send_log l WHERE l.wire_key = w FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
        INSERT INTO asked_again AS a (wire_key, first_at, asked_at, asked_as) VALUES (w, t, t, why)
        ON CONFLICT (wire_key) DO UPDATE SET n = a.n + 1, asked_at = t, asked_as = why
        WHERE a.asked_at <= t - interval '1 minute';
    END IF;
END $$;

-- As in 0005, and notes what asks again. A job that comes twice within ten minutes is no news.
CREATE OR REPLACE FUNCTION send_standing(r send_log, key text, feed text, options jsonb, t timestamptz)
RETURNS TABLE (outcome text, wire_key text, attempt int, fence bigint, seconds_left double precision, reason text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    IF NOT send_is_same(r.send_key, r.fingerprint, key, options ->> 'fingerprint') THEN
        PERFORM send_note_asked_again(r.wire_key, 'key_reused', t);
        RETURN QUERY SELECT 'key_reused', r.wire_key, NULL::int, NULL::bigint, NULL::double precision,
            CASE WHEN r.send_key = key THEN 'the content differs' ELSE 'another send key has this wire key' END, NULL::timestamptz;
    ELSIF r.state = 'claimed' AND r.nonce = options ->> 'nonce' AND r.submit_by > t AND r.feed = send_standing.feed
          AND r.cause IS NULL  -- whoever has said how the attempt went can't have lost the claim's answer
          AND send_heard(r.wire_key, r.feed, r.recipient_key, r.provider_message_id, r.known_message_id) IS NULL THEN
        RETURN QUERY SELECT 'claimed', r.wire_key, r.attempt, r.fence,
            extract(epoch FROM r.submit_by - t)::double precision, NULL, NULL::timestamptz;
    ELSIF r.state <> 'pending' THEN
        IF r.sent_at < t - interval '10 minutes' THEN
            PERFORM send_note_asked_again(r.wire_key, 'already_sent', t);
        END IF;
        RETURN QUERY SELECT CASE r.state WHEN 'sent' THEN 'already_sent' WHEN 'claimed' THEN 'in_flight' ELSE 'failed' END,
            r.wire_key, NULL::int, NULL::bigint, NULL::double precision, coalesce(r.held_reason, r.verdict_reason),
            CASE WHEN r.state = 'claimed' THEN r.next_check_at END;
    END IF;
END $$;
