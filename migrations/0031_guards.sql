-- Whether an event with this message id and recipient may be about another send, too.
CREATE OR REPLACE FUNCTION send_shares_id(w text, of_feed text, id text, about text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
BEGIN
    RETURN EXISTS (SELECT 1 FROM send_log l
        WHERE l.feed = of_feed AND (l.provider_message_id = id OR l.known_message_id = id) AND l.wire_key <> w
          AND (about IS NULL OR l.recipient_key IS NULL OR l.recipient_key = about));
END $$;

-- As in 0021, and an event without our key is an outcome only of a send that is the only one it fits: as `send_heard` takes
-- it for testimony. That is asked of what would count only, and once of all that names the same recipient, or none.
CREATE OR REPLACE FUNCTION send_outcome(r send_log) RETURNS float8[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    keys CONSTANT text[] := ARRAY[r.wire_key, stand_in_key(r.feed, r.provider_message_id), stand_in_key(r.feed, r.known_message_id)];
    e record;
BEGIN
    FOR e IN
        SELECT p.wire_key, p.message_id, p.recipient,
               max(ARRAY[delivery_rank(p.kind), extract(epoch FROM coalesce(p.occurred_at, p.received_at))]::float8[]) AS said
        FROM provider_event p
        WHERE p.wire_key = ANY (keys)
          AND (p.wire_key = r.wire_key OR p.recipient IS NULL OR r.recipient_key IS NULL OR r.recipient_key = p.recipient)
        GROUP BY p.wire_key, p.message_id, p.recipient
        ORDER BY said DESC
    LOOP
        IF e.wire_key = r.wire_key OR NOT send_shares_id(r.wire_key, r.feed, e.message_id, e.recipient) THEN
            RETURN e.said;
        END IF;
    END LOOP;
    RETURN NULL;
END $$;
