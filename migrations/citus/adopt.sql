-- Past sends that are brought into distributed tables.

-- As in 0012, in steps: rows are made here, inserted together, and compared here with those that were there.
CREATE OR REPLACE FUNCTION send_adopt_all(keys text[], feeds text[], options jsonb[])
RETURNS TABLE (n bigint, outcome text, wire_key text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET timezone = 'UTC' AS $$
#variable_conflict use_column
DECLARE
    t CONSTANT timestamptz := clock_timestamp();
    here CONSTANT installation := (SELECT i FROM installation i);
    oldest CONSTANT timestamptz := t - here.memory;
    g record;
    s send_log;
    found_there send_log;
    there send_log[] := '{}';
    rows send_log[] := '{}';
    firsts bigint[] := '{}';
    wires text[] := '{}';
    fresh text[];
    ids text[] := '{}';
    spoken_of text[];
    heard_keys text[] := '{}';
    heard_ats timestamptz[] := '{}';
    heard_kinds text[] := '{}';
BEGIN
    FOR g IN
        SELECT a.n, a.key, a.feed, a.o, f.*, wire_key(a.key, here.namespace) AS w, nullif(btrim(a.o ->> 'message_id', '<> '), '') AS id,
            CASE WHEN a.o ->> 'recipient' NOT LIKE '%,%' THEN recipient_key(a.o ->> 'recipient') END AS address
        FROM unnest(keys, feeds, options) WITH ORDINALITY AS a(key, feed, o, n)
        CROSS JOIN LATERAL send_adopt_facts(a.key, a.feed, a.o, t) AS f
        ORDER BY a.n
    LOOP
        wires := wires || g.w;
        CONTINUE WHEN g.claimed_at < oldest OR g.w = ANY (wires[:cardinality(wires) - 1])
            AND EXISTS (SELECT 1 FROM unnest(rows) AS r WHERE r.wire_key = g.w);
        -- A fingerprint allows a same-key retry, but the provider never saw our key with a request of that time: of an
        -- undecided send it is not kept. A failure counts from now on, so that late evidence is looked for.
        s := NULL;
        s.wire_key := g.w;
        s.send_key := g.key;
        s.state := g.state;
        s.feed := g.feed;
        s.message_class := coalesce(g.o ->> 'message_class', 'default');
        s.recipient := g.o ->> 'recipient';
        s.recipient_key := g.address;
        s.campaign := g.o ->> 'campaign';
        s.source := g.o ->> 'source';
        s.fingerprint := CASE WHEN g.state <> 'claimed' THEN g.o ->> 'fingerprint' END;
        s.unstamped := g.state = 'claimed' AND lower(coalesce(g.o ->> 'stamped', 'f')) NOT IN ('true', 't', '1');
        s.fence := nextval('send_fence');
        s.claimed_at := g.claimed_at;
        s.submit_by := g.submit_by;
        s.answered_at := g.answered_at;
        s.provider_message_id := CASE WHEN octet_length(g.id) > 255
            THEN 'sha256:' || encode(sha256(convert_to(g.id, 'UTF8')), 'hex') ELSE g.id END;
        s.known_message_id := g.o ->> 'known_message_id';
        s.next_check_at := CASE WHEN g.state = 'claimed' THEN g.submit_by END;
        s.verdict_source := CASE WHEN g.state <> 'claimed' THEN 'sender' END;
        s.verdict_reason := CASE WHEN g.state <> 'claimed' THEN 'adopted' END;
        s.failed_at := CASE WHEN g.state = 'failed' THEN t END;
        s.delivery := CASE WHEN g.state = 'sent' THEN delivery_name(delivery_rank(g.o ->> 'heard_kind')) END;
        s.delivery_at := CASE WHEN g.state = 'sent' AND delivery_rank(g.o ->> 'heard_kind') > 0 THEN g.heard_at END;
        rows := rows || s;
        firsts := firsts || g.n;
        IF g.heard_at IS NOT NULL THEN
            heard_keys := heard_keys || g.w;
            heard_ats := heard_ats || g.heard_at;
            heard_kinds := heard_kinds || coalesce(g.o ->> 'heard_kind', 'sent');
        END IF;
    END LOOP;

    fresh := '{}';
    FOR g IN
        INSERT INTO send_log (wire_key, send_key, state, feed, message_class, recipient, recipient_key, campaign, source,
            fingerprint, unstamped, attempt, fence, claimed_by, first_claimed_at, claimed_at, submit_by, answered_at,
            provider_message_id, known_message_id, next_check_at, verdict_source, verdict_reason, sent_at, failed_at,
            delivery, delivery_at)
        SELECT r.wire_key, r.send_key, r.state, r.feed, r.message_class, r.recipient, r.recipient_key, r.campaign, r.source,
            r.fingerprint, r.unstamped, 1, r.fence, 'send_adopt', r.claimed_at, r.claimed_at, r.submit_by, r.answered_at,
            r.provider_message_id, r.known_message_id, r.next_check_at, r.verdict_source, r.verdict_reason,
            CASE WHEN r.state = 'sent' THEN r.answered_at END, r.failed_at, r.delivery, r.delivery_at
        FROM unnest(rows) AS r ORDER BY r.wire_key
        ON CONFLICT (wire_key) DO NOTHING
        RETURNING wire_key
    LOOP
        fresh := fresh || g.wire_key;
    END LOOP;
    spoken_of := ARRAY(SELECT DISTINCT e.wire_key FROM provider_event e WHERE e.wire_key = ANY (fresh));  -- of what had come before
    FOR s IN SELECT r.* FROM unnest(rows) AS r WHERE r.wire_key = ANY (fresh) AND r.state = 'sent' LOOP
        IF num_nonnulls(s.provider_message_id, s.known_message_id) > 0 THEN
            ids := array_remove(ARRAY[stand_in_key(s.feed, s.provider_message_id), stand_in_key(s.feed, s.known_message_id)], NULL);
            IF EXISTS (SELECT 1 FROM provider_event e WHERE e.wire_key = ANY (ids)) THEN
                spoken_of := spoken_of || s.wire_key;
            END IF;
        END IF;
    END LOOP;
    -- The id may be the answer's, which some providers don't use in events: this event names none.
    INSERT INTO provider_event (feed, message_id, event_id, partition_at, received_at, wire_key, kind, testimony, recipient, source)
    SELECT r.feed, '~adopted', 'adopted', event_partition_at(h.at), h.at, h.key, h.kind, 'accepted', r.recipient_key, 'replay'
    FROM unnest(heard_keys, heard_ats, heard_kinds) AS h(key, at, kind) JOIN unnest(rows) AS r ON r.wire_key = h.key
    WHERE h.key = ANY (fresh)
    ORDER BY h.key
    ON CONFLICT DO NOTHING;
    FOREACH s IN ARRAY rows LOOP
        IF s.wire_key = ANY (spoken_of) THEN
            PERFORM send_note_delivery(s.wire_key);
        END IF;
    END LOOP;
    FOR found_there IN SELECT * FROM send_log l WHERE l.wire_key = ANY (wires) LOOP
        there := there || found_there;
    END LOOP;
    RETURN QUERY
    SELECT a.n, CASE WHEN a.n = ANY (firsts) AND a.w = ANY (fresh) THEN 'adopted'
            WHEN l.wire_key IS NULL THEN 'beyond_memory'
            WHEN send_is_same(l.send_key, l.fingerprint, a.key, a.o ->> 'fingerprint') THEN 'exists'
            ELSE 'key_reused' END, a.w
    FROM unnest(keys, options, wires) WITH ORDINALITY AS a(key, o, w, n)
    LEFT JOIN unnest(there) AS l ON l.wire_key = a.w
    ORDER BY a.n;
END $$;
