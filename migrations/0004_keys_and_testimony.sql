-- Keys and addresses in their comparable forms, and what was heard of a send.

-- The wire key of a send key, or of whatever came back from a provider. Twin of webhooks.event.wire_key.
CREATE FUNCTION wire_key(key text, namespace text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT CASE
        WHEN key ~ CASE WHEN namespace = '' THEN '^[a-z0-9_-]{1,48}$' ELSE '^[0-9a-f]{48}$' END THEN key
        WHEN namespace = '' THEN left(encode(sha256(convert_to(key, 'UTF8')), 'hex'), 48)
        ELSE left(encode(sha256(convert_to(namespace, 'UTF8') || '\x00'::bytea || convert_to(key, 'UTF8')), 'hex'), 48)
    END
$$;

-- The same with this installation's namespace.
CREATE FUNCTION wire_key(key text) RETURNS text
LANGUAGE sql STABLE STRICT SET search_path FROM CURRENT AS $$
    SELECT wire_key(key, namespace) FROM installation
$$;

-- What stands for the wire key of an event without one. Twin of webhooks.event.stand_in_key.
CREATE FUNCTION stand_in_key(feed text, message_id text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT '~' || left(encode(sha256(convert_to(feed || E'\n' || message_id, 'UTF8')), 'hex'), 47)
$$;

-- One non-ASCII label of a domain in its ASCII form (RFC 3492).
CREATE FUNCTION punycode(label text) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    digits CONSTANT text := 'abcdefghijklmnopqrstuvwxyz0123456789';
    points CONSTANT int[] := ARRAY(SELECT ascii(c) FROM regexp_split_to_table(label, '') WITH ORDINALITY AS t(c, i) ORDER BY i);
    result text := (SELECT coalesce(string_agg(chr(p), '' ORDER BY i), '') FROM unnest(points) WITH ORDINALITY AS t(p, i) WHERE p < 128);
    basic CONSTANT int := length(result);
    handled int := basic;
    n int := 128;
    delta bigint := 0;
    bias int := 72;
    next_n int;
    point int;
    q bigint;
    k int;
    t int;
BEGIN
    result := result || CASE WHEN basic > 0 THEN '-' ELSE '' END;
    WHILE handled < cardinality(points) LOOP
        next_n := (SELECT min(p) FROM unnest(points) AS p WHERE p >= n);
        delta := delta + (next_n - n)::bigint * (handled + 1);
        n := next_n;
        FOREACH point IN ARRAY points LOOP
            delta := delta + (point < n)::int;
            CONTINUE WHEN point <> n;
            q := delta;
            k := 36;
            LOOP
                t := least(greatest(k - bias, 1), 26);
                EXIT WHEN q < t;
                result := result || substr(digits, (t + (q - t) % (36 - t))::int + 1, 1);
                q := (q - t) / (36 - t);
                k := k + 36;
            END LOOP;
            result := result || substr(digits, q::int + 1, 1);
            delta := CASE WHEN handled = basic THEN delta / 700 ELSE delta / 2 END;
            handled := handled + 1;
            delta := delta + delta / handled;
            k := 0;
            WHILE delta > 455 LOOP
                delta := delta / 35;
                k := k + 36;
            END LOOP;
            bias := (k + 36 * delta / (delta + 38))::int;
            delta := 0;
        END LOOP;
        delta := delta + 1;
        n := n + 1;
    END LOOP;
    RETURN result;
END $$;

-- An address in its comparable form. Twin of webhooks.event.normal_recipient.
CREATE FUNCTION recipient_key(address text) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path FROM CURRENT AS $$
DECLARE
    bare text := btrim(address, E' \t\r\n');
    domain text;
BEGIN
    bare := btrim(coalesce(substring(bare FROM '<([^<>]+)>$'), bare), E' \t\r\n');
    domain := substring(bare FROM '@([^@]*)$');
    IF bare = '' THEN
        RETURN NULL;
    ELSIF domain IS NULL THEN
        RETURN bare;
    END IF;
    RETURN left(bare, length(bare) - length(domain)) || (
        SELECT string_agg(CASE WHEN label ~ '^[\x01-\x7f]*$' OR length(label) > 63 THEN label
            ELSE 'xn--' || punycode(label) END, '.' ORDER BY i)
        FROM regexp_split_to_table(lower(domain), '\.') WITH ORDINALITY AS t(label, i));
END $$;

-- What was said of a send, by any feed, an answer or a look-up: accepted, rejected, none (something was said that proves
-- neither), or NULL: nothing. An event without a key counts where its message id and recipient fit exactly one row.
CREATE FUNCTION send_heard(w text, f text, recipient_key text, provider_message_id text, known_message_id text) RETURNS text
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN bool_or(said = 'accepted') THEN 'accepted'
                WHEN bool_or(said = 'rejected') THEN 'rejected'
                WHEN count(*) > 0 THEN 'none' END
    FROM (
        SELECT testimony AS said FROM provider_event WHERE wire_key = $1
        UNION ALL
        SELECT e.testimony
        FROM (VALUES ($4), ($5)) AS known(id)
        JOIN provider_event e ON e.wire_key = stand_in_key($2, known.id)
        WHERE 1 = (
            SELECT count(*) FROM send_log l
            WHERE l.feed = $2 AND (l.provider_message_id = known.id OR l.known_message_id = known.id)
              AND (e.recipient IS NULL OR l.recipient_key IS NULL OR l.recipient_key = e.recipient))
          AND (e.recipient IS NULL OR $3 IS NULL OR e.recipient = $3)
    ) AS heard
$$;

-- What became of a send's message, as far as any feed said: its rank and time; NULL: nothing was said.
CREATE FUNCTION send_outcome(r send_log) RETURNS float8[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    by_id CONSTANT text[] := ARRAY[stand_in_key(r.feed, r.provider_message_id), stand_in_key(r.feed, r.known_message_id)];
BEGIN
    RETURN (
        SELECT max(ARRAY[delivery_rank(e.kind), extract(epoch FROM coalesce(e.occurred_at, e.received_at))]::float8[])
        FROM provider_event e
        WHERE e.wire_key = r.wire_key
           OR e.wire_key = ANY (by_id) AND (e.recipient IS NULL OR r.recipient_key IS NULL OR r.recipient_key = e.recipient));
END $$;

-- Notes what had become of a message before its row was sent; what is heard of it later, a pass follows.
CREATE FUNCTION send_note_delivery(w text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    best CONSTANT float8[] := (SELECT send_outcome(l) FROM send_log l WHERE l.wire_key = w);
BEGIN
    UPDATE send_log l SET delivery = delivery_name(best[1]::int), delivery_at = to_timestamp(best[2])
    WHERE l.wire_key = w AND l.state = 'sent' AND best[1] > 0;
END $$;

-- The partition an event of this time belongs to. Twin of the inbox's rule.
CREATE FUNCTION event_partition_at(at timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN to_regclass('provider_event_' || to_char(at AT TIME ZONE 'UTC', 'YYYYMM')) IS NOT NULL THEN at
                ELSE '1970-01-01 00:00:00+00'::timestamptz END
$$;
