CREATE TABLE IF NOT EXISTS user (
  id INTEGER PRIMARY KEY,
  name TEXT UNIQUE NOT NULL,
  password_hash TEXT NOT NULL,
  key_digest TEXT UNIQUE NOT NULL  -- SHA-256 of the API key
);

CREATE TABLE IF NOT EXISTS note (
  id INTEGER PRIMARY KEY,
  user_id INTEGER NOT NULL REFERENCES user (id),
  written TEXT NOT NULL DEFAULT CURRENT_DATE,
  text TEXT NOT NULL
);

CREATE INDEX IF NOT EXISTS note_of_user ON note (user_id);

-- The full-text index: https://sqlite.org/fts5.html
CREATE VIRTUAL TABLE IF NOT EXISTS note_words USING fts5(text, content = 'note', content_rowid = 'id', tokenize = 'porter');

CREATE TRIGGER IF NOT EXISTS note_added AFTER INSERT ON note BEGIN
  INSERT INTO note_words (rowid, text) VALUES (new.id, new.text);
END;
