-- What read too much. Small rows, senders' answers above all, fill the gaps of pages that were vacuumed and widen their
-- ranges to this day: a few seconds' events were looked for in half a month. It is built while receivers wait: about a
-- second for a million events.
DROP INDEX provider_event_received;
CREATE INDEX provider_event_received ON provider_event (received_at);
-- Where a campaign makes up much of the log, one of its sends would be looked for from the log's beginning.
ALTER FUNCTION campaign_hold(text, timestamptz) SET enable_seqscan = off;
ALTER FUNCTION campaign_standing(text) SET enable_seqscan = off;
