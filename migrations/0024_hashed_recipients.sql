-- Recipients may be stored hashed, from before the first send and event on (`reconciler migrate --hash-recipients`). Then
-- triggers let no address into the tables, whoever writes: a salted hash stands for it. Nothing else has to know, since
-- rows are compared with rows; only whoever asks by an address asks by its hash (recipient_here). An installation
-- without a salt has no such triggers, and pays nothing.

-- The comparable form of an address, as before, but for a dotted capital I (U+0130) in its domain: its lower case depends on
-- the locale, so it is written as Unicode has it, and as Python does. Hashes of two forms could not be compared.
CREATE OR REPLACE FUNCTION recipient_key(address text) RETURNS text
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
        FROM regexp_split_to_table(lower(replace(domain, chr(304), 'i' || chr(775))), '\.') WITH ORDINALITY AS t(label, i));
END $$;

ALTER TABLE installation ADD COLUMN recipient_salt bytea CHECK (octet_length(recipient_salt) >= 16);

-- What is kept of an address in its comparable form: 160 bits over the whole, whatever the case of ASCII letters, and 64
-- over its domain, so that domains are compared as before. Maps to itself. Twin of webhooks.event.hashed_recipient.
CREATE FUNCTION recipient_hash(normal text, salt bytea) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT CASE WHEN normal ~ '^[0-9a-f]{40}(@[0-9a-f]{16})?$' THEN normal ELSE
        left(encode(sha256(salt || '\x00'::bytea || convert_to(lower(normal COLLATE "C"), 'UTF8')), 'hex'), 40)
        || coalesce('@' || left(encode(sha256(salt || '\x00'::bytea
            || convert_to(lower(substring(normal FROM '@([^@]*)$') COLLATE "C"), 'UTF8')), 'hex'), 16), '') END
$$;

-- The form that an address has in this installation's columns `recipient_key` (and `recipient` of events).
CREATE FUNCTION recipient_here(address text) RETURNS text
LANGUAGE sql STABLE STRICT PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT coalesce(recipient_hash(recipient_key(address), recipient_salt), recipient_key(address)) FROM installation
$$;

-- Words without what looks like an address.
CREATE FUNCTION words_without_addresses(words text) RETURNS text LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT CASE WHEN strpos(words, '@') > 0 THEN regexp_replace(words, '\S*@\S*', '~', 'g') ELSE words END
$$;

-- Of one recipient only recipient_key holds anything; several are kept apart by their commas, as they are given. A send
-- key that may hold an address is refused rather than replaced: its sender asks by it later. The payload is the
-- application's own.
CREATE FUNCTION send_log_without_addresses() RETURNS trigger
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    IF strpos(NEW.send_key, '@') > 0 THEN
        RAISE EXCEPTION 'recipients are stored hashed here, and this send key holds an @: make it with keys.hashed_key'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NEW.recipient_key NOT LIKE '~forgotten:%' THEN
        NEW.recipient_key := recipient_here(NEW.recipient_key);
    END IF;
    NEW.recipient := CASE
        WHEN NEW.recipient_key IS NOT NULL THEN NULL
        WHEN NEW.recipient = '~forgotten' THEN NEW.recipient
        WHEN strpos(NEW.recipient, ',') > 0 THEN (
            SELECT string_agg(coalesce(recipient_here(one), ''), ',' ORDER BY n)
            FROM string_to_table(NEW.recipient, ',') WITH ORDINALITY AS t(one, n)) END;
    NEW.cause := words_without_addresses(NEW.cause);
    NEW.verdict_reason := words_without_addresses(NEW.verdict_reason);
    IF strpos(NEW.response::text, '@') > 0 THEN
        NEW.response := NULL;
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION provider_event_without_addresses() RETURNS trigger
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    NEW.recipient := recipient_here(NEW.recipient);
    NEW.reason := words_without_addresses(NEW.reason);
    NEW.raw := '';
    RETURN NEW;
END $$;

CREATE FUNCTION verdict_without_addresses() RETURNS trigger
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    NEW.reason := words_without_addresses(NEW.reason);
    NEW.note := words_without_addresses(NEW.note);
    RETURN NEW;
END $$;

-- An older release, or a person, may write a plain address here.
CREATE FUNCTION suppression_without_addresses() RETURNS trigger
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    NEW.recipient_key := lower(recipient_here(NEW.recipient_key));
    NEW.reason := words_without_addresses(NEW.reason);
    RETURN NEW;
END $$;

CREATE FUNCTION reason_without_addresses() RETURNS trigger
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    NEW.reason := words_without_addresses(NEW.reason);
    RETURN NEW;
END $$;

-- Lets recipients be stored hashed from now on, and for ever. Says whether they are: false where addresses may be stored
-- already. Rows that need no change pay a comparison.
CREATE FUNCTION recipients_hash_from_now_on(salt bytea) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    LOCK TABLE installation, campaign, feed_state, send_log, provider_event, suppression IN SHARE ROW EXCLUSIVE MODE;
    IF (SELECT recipient_salt IS NOT NULL FROM installation) THEN
        RETURN true;
    ELSIF EXISTS (SELECT FROM send_log) OR EXISTS (SELECT FROM provider_event) THEN
        RETURN false;
    END IF;
    UPDATE installation SET recipient_salt = salt;
    UPDATE suppression SET recipient_key = recipient_hash(recipient_key, salt), reason = words_without_addresses(reason);
    UPDATE campaign SET reason = words_without_addresses(reason) WHERE strpos(reason, '@') > 0;
    UPDATE feed_state SET reason = words_without_addresses(reason) WHERE strpos(reason, '@') > 0;
    CREATE TRIGGER without_addresses BEFORE INSERT OR UPDATE ON send_log FOR EACH ROW
        WHEN (NEW.recipient IS NOT NULL OR NEW.recipient_key !~ '^[0-9a-f]{40}(@[0-9a-f]{16})?$' OR strpos(NEW.send_key, '@') > 0
            OR strpos(NEW.cause, '@') > 0 OR strpos(NEW.verdict_reason, '@') > 0 OR strpos(NEW.response::text, '@') > 0)
        EXECUTE FUNCTION send_log_without_addresses();
    CREATE TRIGGER without_addresses BEFORE INSERT ON provider_event FOR EACH ROW
        WHEN (NEW.raw <> '' OR NEW.recipient !~ '^[0-9a-f]{40}(@[0-9a-f]{16})?$' OR strpos(NEW.reason, '@') > 0)
        EXECUTE FUNCTION provider_event_without_addresses();
    CREATE TRIGGER without_addresses BEFORE INSERT ON verdict FOR EACH ROW
        WHEN (strpos(NEW.reason, '@') > 0 OR strpos(NEW.note, '@') > 0)
        EXECUTE FUNCTION verdict_without_addresses();
    CREATE TRIGGER without_addresses BEFORE INSERT OR UPDATE ON suppression FOR EACH ROW
        WHEN (NEW.recipient_key !~ '^[0-9a-f]{40}(@[0-9a-f]{16})?$' OR strpos(NEW.reason, '@') > 0)
        EXECUTE FUNCTION suppression_without_addresses();
    CREATE TRIGGER without_addresses BEFORE INSERT OR UPDATE ON campaign FOR EACH ROW
        WHEN (strpos(NEW.reason, '@') > 0) EXECUTE FUNCTION reason_without_addresses();
    CREATE TRIGGER without_addresses BEFORE INSERT OR UPDATE ON feed_state FOR EACH ROW
        WHEN (strpos(NEW.reason, '@') > 0) EXECUTE FUNCTION reason_without_addresses();
    RETURN true;
END $$;
