-- Brings in sends of the time before this installation. Nobody is asked; what a pass makes of them is its own rule.

-- Undecided sends that did not carry their key can't be heard of by it: their absence proves nothing.
ALTER TABLE send_log ADD COLUMN unstamped boolean NOT NULL DEFAULT false;

-- The time that an option gives; NULL where it is absent. In ISO form only: PostgreSQL by itself would read 02/11/2026
-- as it is set up to, and take `yesterday`. Without a zone it is one of the session's.
CREATE FUNCTION send_adopt_time(options jsonb, name text) RETURNS timestamptz
LANGUAGE plpgsql STABLE AS $$
DECLARE
    given CONSTANT text := options ->> name;
BEGIN
    IF given !~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)? ?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?$' THEN
        RAISE EXCEPTION '% is no time: write 2026-11-02T08:00:00Z', name USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN given::timestamptz;
END $$;

-- What a past send's options say, checked: times that fit each other, and nothing that contradicts itself.
CREATE FUNCTION send_adopt_facts(key text, feed text, options jsonb, t timestamptz)
RETURNS TABLE (state text, claimed_at timestamptz, submit_by timestamptz, answered_at timestamptz, heard_at timestamptz)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
#variable_conflict use_variable
DECLARE
    refused CONSTANT text := lower(options ->> 'failed');
    wrong text;
BEGIN
    -- `failed` and `stamped` may be true or false, which elsewhere no option is.
    PERFORM send_check_call(key, feed, options - ARRAY(SELECT name FROM jsonb_each(options) AS o(name, value)
        WHERE name IN ('failed', 'stamped') AND jsonb_typeof(value) = 'boolean'),
        ARRAY['claimed_at', 'submit_by', 'answered_at', 'message_id', 'failed', 'stamped', 'heard_at', 'heard_kind',
        'recipient', 'message_class', 'campaign', 'source', 'fingerprint', 'known_message_id']);
    claimed_at := send_adopt_time(options, 'claimed_at');
    submit_by := coalesce(send_adopt_time(options, 'submit_by'), claimed_at + interval '60 seconds');
    answered_at := send_adopt_time(options, 'answered_at');
    heard_at := send_adopt_time(options, 'heard_at');
    state := CASE WHEN refused IN ('true', 't', '1') THEN 'failed' WHEN answered_at IS NOT NULL THEN 'sent' ELSE 'claimed' END;
    wrong := CASE
        WHEN refused NOT IN ('true', 't', '1', 'false', 'f', '0') THEN 'failed must be true or false'
        WHEN lower(options ->> 'stamped') NOT IN ('true', 't', '1', 'false', 'f', '0') THEN 'stamped must be true or false'
        WHEN claimed_at IS NULL THEN 'claimed_at is missing: when it was submitted'
        WHEN claimed_at > t THEN 'claimed_at lies in the future'
        WHEN submit_by <= claimed_at OR submit_by > claimed_at + interval '24 hours' THEN
            'submit_by must lie after claimed_at, by 24 hours at most'
        WHEN answered_at < claimed_at THEN 'answered_at lies before claimed_at'
        WHEN answered_at > t THEN 'answered_at lies in the future'
        WHEN heard_at < claimed_at THEN 'heard_at lies before claimed_at'
        WHEN heard_at > t THEN 'heard_at lies in the future'
        WHEN state = 'failed' AND coalesce(options ->> 'answered_at', options ->> 'heard_at', options ->> 'message_id') IS NOT NULL
            THEN 'failed means that the provider refused it: answered_at, heard_at and message_id say that it did not'
        WHEN options ->> 'message_id' IS NOT NULL AND answered_at IS NULL AND heard_at IS NULL
            THEN 'a message_id shows that the provider took it: give answered_at, or heard_at'
        WHEN options ->> 'heard_kind' IS NOT NULL AND heard_at IS NULL THEN 'heard_kind needs heard_at'
        WHEN options ->> 'heard_kind' NOT IN ('sent', 'delivered', 'deferred', 'bounced', 'opened', 'clicked', 'complained')
            THEN 'heard_kind must prove acceptance: sent, delivered, deferred, bounced, opened, clicked or complained'
    END;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION '%', wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN NEXT;
END $$;

-- Brings past sends in, all or, where one is wrong, none; `send_adopt` says what each may be. One call for many, since
-- a statement's own cost is that of a row. `n` counts the given ones from 1.
CREATE FUNCTION send_adopt_all(keys text[], feeds text[], options jsonb[])
RETURNS TABLE (n bigint, outcome text, wire_key text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET timezone = 'UTC' AS $$
#variable_conflict use_column
DECLARE
    wires text[];
    adopted bigint[];
    spoken_of text[];
    t CONSTANT timestamptz := clock_timestamp();
    here CONSTANT installation := (SELECT i FROM installation i);
    oldest CONSTANT timestamptz := t - here.memory;
BEGIN
    WITH given AS MATERIALIZED (
        SELECT g.n, g.key, g.feed, g.o, f.*, wire_key(g.key, here.namespace) AS w, nullif(btrim(g.o ->> 'message_id', '<> '), '') AS id,
            CASE WHEN g.o ->> 'recipient' NOT LIKE '%,%' THEN recipient_key(g.o ->> 'recipient') END AS address
        FROM unnest(keys, feeds, options) WITH ORDINALITY AS g(key, feed, o, n)
        CROSS JOIN LATERAL send_adopt_facts(g.key, g.feed, g.o, t) AS f
    ), first AS MATERIALIZED (
        SELECT DISTINCT ON (w) n, key, feed, o, state, claimed_at, submit_by, answered_at, heard_at, w, address,
            CASE WHEN octet_length(id) > 255 THEN 'sha256:' || encode(sha256(convert_to(id, 'UTF8')), 'hex') ELSE id END AS id
        FROM given
        WHERE claimed_at >= oldest
        ORDER BY w, n
    ), fresh AS (
        -- A fingerprint allows a same-key retry, but the provider never saw our key with a request of that time: of an
        -- undecided send it is not kept. A failure counts from now on, so that late evidence is looked for.
        INSERT INTO send_log (wire_key, send_key, state, feed, message_class, recipient, recipient_key, campaign, source,
            fingerprint, unstamped, attempt, fence, claimed_by, first_claimed_at, claimed_at, submit_by, answered_at,
            provider_message_id, known_message_id, next_check_at, verdict_source, verdict_reason, sent_at, failed_at,
            delivery, delivery_at)
        SELECT w, key, state, feed, coalesce(o ->> 'message_class', 'default'), o ->> 'recipient', address, o ->> 'campaign',
            o ->> 'source', CASE WHEN state <> 'claimed' THEN o ->> 'fingerprint' END,
            state = 'claimed' AND lower(coalesce(o ->> 'stamped', 'f')) NOT IN ('true', 't', '1'), 1, nextval('send_fence'), 'send_adopt',
            claimed_at, claimed_at, submit_by, answered_at, id, o ->> 'known_message_id',
            CASE WHEN state = 'claimed' THEN submit_by END, CASE WHEN state <> 'claimed' THEN 'sender' END,
            CASE WHEN state <> 'claimed' THEN 'adopted' END, answered_at, CASE WHEN state = 'failed' THEN t END,
            CASE WHEN state = 'sent' THEN delivery_name(delivery_rank(o ->> 'heard_kind')) END,
            CASE WHEN state = 'sent' AND delivery_rank(o ->> 'heard_kind') > 0 THEN heard_at END
        FROM first ORDER BY w
        ON CONFLICT (wire_key) DO NOTHING
        RETURNING wire_key
    ), told AS (
        -- The id may be the answer's, which some providers don't use in events: this event names none.
        INSERT INTO provider_event (feed, message_id, event_id, partition_at, received_at, wire_key, kind, testimony,
            recipient, source)
        SELECT feed, '~adopted', 'adopted', event_partition_at(heard_at), heard_at, w, coalesce(o ->> 'heard_kind', 'sent'),
            'accepted', address, 'replay'
        FROM first JOIN fresh ON fresh.wire_key = first.w
        WHERE heard_at IS NOT NULL
        ORDER BY w
        ON CONFLICT DO NOTHING
    )
    SELECT (SELECT array_agg(w ORDER BY n) FROM given), array_agg(f.n), array_agg(f.w) FILTER (WHERE f.state = 'sent' AND EXISTS (
            SELECT FROM provider_event e WHERE e.wire_key = ANY (
                ARRAY[f.w, stand_in_key(f.feed, f.id), stand_in_key(f.feed, f.o ->> 'known_message_id')])))
    INTO wires, adopted, spoken_of
    FROM first f JOIN fresh ON fresh.wire_key = f.w;

    PERFORM send_note_delivery(w) FROM unnest(spoken_of) AS w;  -- of what had come before
    RETURN QUERY
    SELECT g.n, CASE WHEN g.n = ANY (adopted) THEN 'adopted'
            WHEN l.wire_key IS NULL THEN 'beyond_memory'
            WHEN send_is_same(l.send_key, l.fingerprint, g.key, g.o ->> 'fingerprint') THEN 'exists'
            ELSE 'key_reused' END, g.w
    FROM unnest(keys, options, wires) WITH ORDINALITY AS g(key, o, w, n)
    LEFT JOIN send_log l ON l.wire_key = g.w
    ORDER BY g.n;
END $$;

-- Brings one past send in, in the caller's transaction. Outcomes: adopted, exists (there is a row: nothing changes),
-- key_reused, beyond_memory. Options: claimed_at (required: when it was submitted; a time without a zone is one of UTC);
-- submit_by, 60 s later; answered_at, when the provider answered: the send is sent, and a control of its feed;
-- message_id, the provider's; failed, true: the provider refused it. Neither: it is claimed with its past times, and a
-- pass decides it; on absence only where stamped is true: the message carried the key. heard_at, when the first event that carried its key was stored elsewhere, and
-- heard_kind, the event's kind, `sent`: they become testimony, and the send's lag. As in send_claim: message_class,
-- recipient, campaign, source, fingerprint, known_message_id.
CREATE FUNCTION send_adopt(key text, feed text, options jsonb) RETURNS TABLE (outcome text, wire_key text)
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT outcome, wire_key FROM send_adopt_all(ARRAY[$1], ARRAY[$2], ARRAY[$3])
$$;
