-- Tables of a desk's database, desk.sqlite.
-- file: id of the file under Files that was coded; sample: whether it is the sample that a visitor tries
CREATE TABLE IF NOT EXISTS sources (
    id INTEGER PRIMARY KEY, name TEXT, sha256 TEXT UNIQUE, at REAL, targets TEXT, file TEXT, sample INTEGER DEFAULT 0);
-- deciders: JSON list of who decided; key: what descriptions have in common that are one to the model, with their language
CREATE TABLE IF NOT EXISTS cards (
    id INTEGER PRIMARY KEY, source INTEGER, place INTEGER, text TEXT, lang TEXT, predicted TEXT, conf REAL,
    times INTEGER, version INTEGER DEFAULT 0, status TEXT DEFAULT 'open', codes TEXT, deciders TEXT, at REAL,
    row TEXT, double INTEGER, key TEXT);
CREATE UNIQUE INDEX IF NOT EXISTS cards_by_place ON cards (source, place);
CREATE INDEX IF NOT EXISTS cards_by_status ON cards (source, status, place);
CREATE INDEX IF NOT EXISTS cards_by_key ON cards (key);
CREATE TABLE IF NOT EXISTS draws (source INTEGER, due INTEGER, place INTEGER);
-- before, after: JSON of the card's state before, and of the reviewer's own codes
-- batch: id of the first of the decisions that were made at once
CREATE TABLE IF NOT EXISTS decisions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, card INTEGER, who TEXT, at REAL, action TEXT, before TEXT, after TEXT,
    undone INTEGER DEFAULT 0, batch INTEGER);
CREATE INDEX IF NOT EXISTS decisions_by_card ON decisions (card);
-- decisions that count; 'carried' are those made on the same description in another file
CREATE VIEW IF NOT EXISTS live_decisions AS SELECT * FROM decisions WHERE undone = 0 AND action != 'undone';
CREATE VIEW IF NOT EXISTS own_decisions AS SELECT * FROM live_decisions WHERE action != 'carried';
-- cards of a desk of 1.0.0 have no keys
UPDATE cards SET key = card_key(text, lang) WHERE key IS NULL;
