package pglock

import (
	"crypto/sha256"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// statements are the statements of a Table. Each is a transaction of its own, which locks one row before it looks at it.
//
// The lock is free without an owner, or when its lease is over; "until" is then since when. It is the turn of the first in the
// queue, and of each of the others when those before it have not come for a while. A statement that finds the row locked
// waits, and then evaluates its conditions for the new row: clock_timestamp() goes on meanwhile, and now() would not.
//
// The index on the token makes it part of a key for the server: a change of the token conflicts with FOR KEY SHARE, and
// changes of the other columns do not.
type statements struct {
	channel                                                                      string
	create, verify, unique, take, enqueue, renew, extend, release, forget, check string
	prune, listen                                                                string
}

func newStatements(table pgx.Identifier) statements {
	s := statements{channel: fmt.Sprintf("redlatch_%x", sha256.Sum256([]byte(table.Sanitize())))[:40]}
	with := strings.NewReplacer("TABLE_NAME", table.Sanitize(), "CHANNEL_NAME", pgx.Identifier{s.channel}.Sanitize()).Replace
	const (
		free = `(l.owner IS NULL OR l.until <= clock_timestamp())`
		// place is 1 for the first, and behind the last for one that is not in the queue.
		place = `coalesce(array_position(l.queue, $2::text), cardinality(l.queue) + 1)`
		turn  = `(` + place + ` = 1 OR l.until <= clock_timestamp() - make_interval(secs => $4::float8 * (` + place + ` - 1)))`
	)

	s.create = with(`CREATE TABLE IF NOT EXISTS TABLE_NAME (
	name  text COLLATE "C" PRIMARY KEY,
	token bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
	owner text,
	until timestamptz NOT NULL,
	queue text[] NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50)`)

	s.verify = with(`SELECT name, token, owner, until, queue FROM TABLE_NAME LIMIT 0`)

	// table. Without such an index Check would keep nobody out.
	s.unique = `SELECT count(*) > 0 FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
WHERE i.indrelid = to_regclass($1::text) AND a.attname = 'token' AND i.indisunique AND i.indpred IS NULL AND i.indexprs IS NULL`

	// name, owner, lease, grace, deadline. What the first condition sees may be old; it saves the write if the lock is taken.
	s.take = with(`WITH taken AS (
	INSERT INTO TABLE_NAME AS l (name, owner, until)
	SELECT $1::text, $2::text, clock_timestamp() + make_interval(secs => $3::float8)
	WHERE clock_timestamp() < to_timestamp($5::float8)
		AND NOT EXISTS (SELECT FROM TABLE_NAME AS l WHERE l.name = $1 AND NOT (` + free + ` AND ` + turn + `))
	ON CONFLICT (name) DO UPDATE SET token = DEFAULT, owner = $2, until = clock_timestamp() + make_interval(secs => $3),
		queue = l.queue[` + place + ` + 1:]
	WHERE ` + free + ` AND ` + turn + ` AND clock_timestamp() < to_timestamp($5)
	RETURNING token
)
SELECT token, true, true, 0::float8, 0, extract(epoch FROM clock_timestamp())::float8 FROM taken
UNION ALL
SELECT coalesce(l.token, 0), false, l.owner IS NOT DISTINCT FROM $2, coalesce(extract(epoch FROM l.until - clock_timestamp()), 0)::float8,
	coalesce(array_position(l.queue, $2), 0), extract(epoch FROM clock_timestamp())::float8
FROM (SELECT) AS answer LEFT JOIN TABLE_NAME AS l ON l.name = $1 WHERE NOT EXISTS (SELECT FROM taken)`)

	// name, owner, deadline.
	s.enqueue = with(`UPDATE TABLE_NAME SET queue = queue || $2::text
WHERE name = $1::text AND NOT $2 = ANY (queue) AND clock_timestamp() < to_timestamp($3::float8)`)

	// names, owners, lease.
	s.renew = with(`UPDATE TABLE_NAME AS l SET until = greatest(l.until, clock_timestamp() + make_interval(secs => $3::float8))
FROM unnest($1::text[], $2::text[]) AS h(name, owner)
WHERE l.name = h.name AND l.owner = h.owner AND l.until > clock_timestamp()
RETURNING l.owner`)

	// name, owner, lease.
	s.extend = with(`UPDATE TABLE_NAME SET until = greatest(until, clock_timestamp() + make_interval(secs => $3::float8))
WHERE name = $1::text AND owner = $2::text AND until > clock_timestamp()
RETURNING 1`)

	// name, owner, channel, token. Only the first in the queue is told. The second row says that nobody has had the lock since.
	s.release = with(`WITH released AS (
	UPDATE TABLE_NAME SET owner = NULL, until = clock_timestamp() WHERE name = $1::text AND owner = $2::text
	RETURNING queue[1] AS next
)
SELECT true, CASE WHEN next IS NOT NULL THEN pg_notify($3::text, next) IS NULL END FROM released
UNION ALL
SELECT false, NULL FROM TABLE_NAME WHERE name = $1 AND owner IS NULL AND token = $4::bigint AND NOT EXISTS (SELECT FROM released)`)

	// names, owners, channel, whether for the last time. A request that is just being committed is not seen; an update of the
	// row, which is made for the last time in any case, waits for it.
	s.forget = with(`WITH forgotten AS (
	UPDATE TABLE_NAME AS l SET
		owner = CASE WHEN l.owner = ANY (h.owners) THEN NULL ELSE l.owner END,
		until = CASE WHEN l.owner = ANY (h.owners) THEN clock_timestamp() ELSE l.until END,
		queue = ARRAY(SELECT q.owner FROM unnest(l.queue) WITH ORDINALITY AS q(owner, n) WHERE q.owner <> ALL (h.owners) ORDER BY n)
	FROM (
		SELECT name, array_agg(owner) AS owners, bool_or(last) AS last
		FROM unnest($1::text[], $2::text[], $4::bool[]) AS r(name, owner, last) GROUP BY name
	) AS h
	WHERE l.name = h.name AND (h.last OR l.owner = ANY (h.owners) OR l.queue && h.owners)
	RETURNING l.owner IS NULL OR l.until <= clock_timestamp() AS free, l.queue[1] AS next
)
SELECT CASE WHEN free AND next IS NOT NULL THEN pg_notify($3::text, next) IS NULL END FROM forgotten`)

	// name, owner, token.
	s.check = with(`SELECT FROM TABLE_NAME WHERE name = $1 AND owner = $2 AND token = $3 FOR KEY SHARE`)

	// seconds.
	s.prune = with(`DELETE FROM TABLE_NAME WHERE until < clock_timestamp() - make_interval(secs => $1::float8)`)

	s.listen = with(`LISTEN CHANNEL_NAME`)
	return s
}
