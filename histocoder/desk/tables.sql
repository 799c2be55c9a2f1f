-- Tables of a desk's database, desk.sqlite.
CREATE TABLE IF NOT EXISTS sources (id INTEGER PRIMARY KEY, name TEXT, sha256 TEXT UNIQUE, at REAL, targets TEXT);
CREATE TABLE IF NOT EXISTS cards (
    id INTEGER PRIMARY KEY, source INTEGER, place INTEGER, text TEXT, lang TEXT, predicted TEXT, conf REAL,
    times INTEGER, version INTEGER DEFAULT 0, status TEXT DEFAULT 'open', codes TEXT, who TEXT, at REAL,
    row TEXT, double INTEGER);
CREATE UNIQUE INDEX IF NOT EXISTS cards_by_place ON cards (source, place);
CREATE INDEX IF NOT EXISTS cards_by_status ON cards (source, status, place);
CREATE TABLE IF NOT EXISTS draws (source INTEGER, due INTEGER, place INTEGER);
CREATE TABLE IF NOT EXISTS decisions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, card INTEGER, who TEXT, at REAL, action TEXT, before TEXT, after TEXT,
    undone INTEGER DEFAULT 0, batch INTEGER);
CREATE INDEX IF NOT EXISTS decisions_by_card ON decisions (card);
