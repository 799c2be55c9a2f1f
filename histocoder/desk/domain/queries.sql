-- The queries on a desk's database, each under its name.

-- name: sources
SELECT s.id, s.name, s.file, count(c.id) AS cards,
       coalesce(sum(c.status = 'settled'), 0) AS settled,
       coalesce(sum(c.status != 'open'), 0) AS decided
FROM sources s LEFT JOIN cards c ON c.source = s.id
GROUP BY s.id ORDER BY s.id DESC;

-- name: sources_of_content (1.0.0 knew sources by the digest alone)
SELECT id FROM sources WHERE sha256 IN (:content, :digest);

-- name: sources_of_file
SELECT id FROM sources WHERE file = :file;

-- name: targets_of_cards
SELECT DISTINCT s.targets FROM cards c JOIN sources s ON s.id = c.source
WHERE c.id IN (SELECT value FROM json_each(:cards));

-- name: add_source
INSERT INTO sources (name, sha256, at, targets, file, sample)
VALUES (:name, :content, :at, :targets, :file, :is_sample);

-- name: add_card
INSERT INTO cards (source, place, text, lang, predicted, conf, times, row, double, key)
VALUES (:source, :place, :text, :lang, :predicted, :conf, :times, :row, :double, :key);

-- name: add_draw
INSERT INTO draws (source, due, place) VALUES (:source, :due, :place);

-- name: remove_decisions
DELETE FROM decisions WHERE card IN (SELECT id FROM cards WHERE source = :source);

-- name: remove_draws
DELETE FROM draws WHERE source = :source;

-- name: remove_cards
DELETE FROM cards WHERE source = :source;

-- name: remove_source
DELETE FROM sources WHERE id = :source;

-- name: card
SELECT * FROM cards WHERE id = :card;

-- name: cards_for_two
SELECT * FROM cards WHERE source = :source AND double;

-- name: next_cards (of those for two, the ones that the reviewer has not decided on yet)
SELECT * FROM cards c
WHERE source = :source AND status = 'open' AND place > :after
      AND NOT (double AND EXISTS (SELECT 1 FROM live_decisions d WHERE d.card = c.id AND d.who = :who))
ORDER BY place LIMIT :limit;

-- name: matches
SELECT * FROM cards
WHERE source = :source AND instr(casefold(text), casefold(:q))
      AND (:code = '' OR EXISTS (SELECT 1 FROM json_each(coalesce(codes, predicted))
                                 WHERE instr(casefold(value), casefold(:code)) = 1))
      AND (:lang = '' OR lang = :lang) AND (:status = '' OR status = :status)
      AND conf BETWEEN :low AND :high
ORDER BY CASE :sort WHEN 'times' THEN -times WHEN 'conf' THEN conf WHEN 'text' THEN text END, place
LIMIT :limit OFFSET :offset;

-- name: change_card
UPDATE cards SET version = version + :is_changed, status = :status, codes = :codes,
                 deciders = :deciders, at = :at
WHERE id = :card;

-- name: settled (decisions on the sample count for models of the sample alone)
SELECT c.* FROM cards c JOIN sources s ON s.id = c.source
WHERE c.status = 'settled' AND s.targets = :targets AND s.sample <= :of_sample
ORDER BY c.at, c.id;

-- name: add_decision
INSERT INTO decisions (card, who, at, action, before, after, batch)
VALUES (:card, :who, :at, :action, :before, :after, :batch);

-- name: opinions (on a card for two, not how it was settled; the last one of a person counts)
SELECT who, after FROM own_decisions WHERE card = :card AND action != 'settled' ORDER BY id;

-- name: last_on_card
SELECT * FROM live_decisions WHERE card = :card ORDER BY id DESC LIMIT 1;

-- name: last_decision
SELECT coalesce(max(id), 0) AS id FROM decisions;

-- name: last_batch (the reviewer's last decision in a file, and those that were made with it)
SELECT d.* FROM own_decisions d JOIN cards c ON c.id = d.card
WHERE c.source = :source AND d.who = :who AND coalesce(d.batch, -d.id) = (
    SELECT coalesce(e.batch, -e.id) FROM own_decisions e JOIN cards f ON f.id = e.card
    WHERE f.source = :source AND e.who = :who ORDER BY e.id DESC LIMIT 1)
ORDER BY d.id DESC;

-- name: undo_decision
UPDATE decisions SET undone = 1 WHERE id = :decision;

-- name: change_before (of the decision after another one on its card)
UPDATE decisions SET before = :before
WHERE id = (SELECT min(id) FROM live_decisions WHERE card = :card AND id > :decision);

-- name: carried_from (what was carried from the last decision on a card, which of two people's is the later one)
SELECT d.* FROM live_decisions d JOIN cards c ON c.id = d.card
WHERE d.action = 'carried' AND c.key = (SELECT key FROM cards WHERE id = :card) AND d.batch = (
    SELECT coalesce(e.batch, e.id) FROM live_decisions e WHERE e.card = :card ORDER BY e.id DESC LIMIT 1)
ORDER BY d.id DESC;

-- name: to_carry (cards on which nobody has decided, of a source or with the description of a card, and the last decision on that)
SELECT c.id, o.status, o.codes, o.deciders, o.at,
       json_object('status', c.status, 'codes', json(c.codes), 'deciders', json(coalesce(c.deciders, '[]')),
                   'at', c.at) AS before,
       (SELECT coalesce(d.batch, d.id) FROM live_decisions d WHERE d.card = o.id
        ORDER BY d.id DESC LIMIT 1) AS batch
FROM cards c JOIN sources s ON s.id = c.source
JOIN cards o ON o.id = (
    SELECT e.id FROM cards e JOIN sources t ON t.id = e.source
    WHERE e.key = c.key AND (e.status = 'settled' OR e.id = :card)
          AND t.targets = s.targets AND t.sample = s.sample
    ORDER BY e.at DESC, e.id DESC LIMIT 1)
WHERE NOT EXISTS (SELECT 1 FROM own_decisions d WHERE d.card = c.id)
      AND 'settled' IN (o.status, c.status)
      AND (c.source = :source OR (NOT c.double AND c.key = (SELECT key FROM cards WHERE id = :card)));

-- name: carry
UPDATE cards SET version = version + 1, status = :status, codes = :codes, deciders = :deciders,
                 at = :at, double = 0
WHERE id = :card;

-- name: decisions (on cards for two once both have decided)
SELECT s.name AS file, c.text, c.lang, c.double AS for_two, d.who, d.at, d.action, d.after AS codes,
       c.status, coalesce(c.codes, '[]') AS settled
FROM own_decisions d JOIN cards c ON c.id = d.card JOIN sources s ON s.id = c.source
WHERE NOT (c.double AND c.status = 'open')
ORDER BY s.id, c.place, d.id;

-- name: progress (rows_right: those that the model coded as people did, once everything is decided)
SELECT count(*) AS cards, total(times) AS rows,
       total(times * (status = 'settled')) AS rows_settled,
       total(status = 'settled') AS cards_settled, total(status = 'unsure') AS cards_unsure,
       max(place * (status != 'open')) AS last_place_decided,
       CASE WHEN total(status IN ('open', 'disputed')) = 0 THEN (
           SELECT total(times) FROM cards
           WHERE source = :source AND status = 'settled' AND has_same_codes(codes, predicted))
       END AS rows_right
FROM cards WHERE source = :source;

-- name: draws
SELECT c.*, d.due FROM draws d JOIN cards c USING (source, place)
WHERE source = :source ORDER BY d.due;
