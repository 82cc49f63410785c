"""The floor of the store on PostgreSQL: the statements of Leyden's store through bare libpq (`psycopg.pq`), and nothing else.

Every statement is prepared and an operation is as few messages as the store's, with nothing checked, no object made, no
thread and nobody who listens. No store that sends these statements can be faster.
"""

import json
import os
import re
import select

from leyden.store.sql.postgres import Target, connect, migrate
from leyden.store.sql.queries import load_queries, statements_for

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
NOW = "SELECT extract(epoch FROM now())::double precision"
SPAN_BYTES = 1300
WHERE_SHARD = "WHERE shard = pg_backend_pid() % 16"
ENQUEUED = f"WITH totalled AS (UPDATE totals SET enqueued = enqueued + $1 {WHERE_SHARD}) SELECT count_commit($2, $3), pg_notify($4, $5)"
SUCCEEDED = (
    "WITH totalled AS (UPDATE totals SET succeeded = succeeded + $1, attempts = attempts + $2, bytes = bytes + $3, "
    f"spans = spans + $4 {WHERE_SHARD}) SELECT count_commit($5, $6), pg_notify($7, $8)"
)


class Wire:
    """Statements to one connection in libpq's pipeline mode."""

    def __init__(self, url):
        target = Target.parse(url, "process")
        self._connection = connect(target)  # its settings hold for the whole session
        migrate(self._connection, target)
        self._pq = self._connection.pgconn
        self._pq.enter_pipeline_mode()
        self._readable = select.poll()
        self._readable.register(self._pq.socket, select.POLLIN)
        self._both = select.poll()
        self._both.register(self._pq.socket, select.POLLIN | select.POLLOUT)
        self._names = {}
        self._awaited = 0

    def send(self, statement, *values):
        """Queue a statement with `$1`; values are texts, numbers, bytes or None."""
        name = self._names.get(statement)
        if name is None:
            name = self._names[statement] = b"floor_%d" % len(self._names)
            self._pq.send_prepare(name, statement.encode())
            self._awaited += 1
        self._pq.send_query_prepared(name, [None if v is None else str(v).encode() for v in values] or None)
        self._awaited += 1

    def commit(self):
        """End with a COMMIT; the results of what was queued."""
        self.send("COMMIT")
        return self.results()

    def results(self):
        """Send what is queued; its results."""
        self._pq.pipeline_sync()
        while self._pq.flush():
            if any(event & select.POLLIN for _, event in self._both.poll()):
                self._pq.consume_input()
        results = []
        for _ in range(self._awaited):
            results.append(self._next())
            self._next()
        self._next()
        self._awaited = 0
        return results

    def _next(self):
        while self._pq.is_busy():
            self._readable.poll()
            self._pq.consume_input()
        result = self._pq.get_result()
        assert result is None or not result.error_message, result.error_message
        return result

    def close(self):
        self._connection.close()


def numbered(text):
    """A query of Leyden's with `$1` for its `:names` and `?`, and its names in this order."""
    names = []

    def number(found):
        name = found[1] or f"?{len(names)}"
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    return re.sub(r"(?<!:):([a-z_]\w*)|\?", number, text), names


class PostgresFloorStore:
    """The calls of `store_side.Program`."""

    def __init__(self, url):
        self._wire = Wire(url)
        self._queries = load_queries("postgres")
        self._numbered = {name: numbered(text) for name, text in self._queries.items()}
        self._claimed = {}
        """The numbers of the rollouts that are being worked on, by id."""
        self._connection = None
        self._send("open_connection")
        self._connection = self._wire.results()[-1].get_value(0, 0).decode()
        self._commits = 0
        self._ids = 0

    async def enqueue_rollout(self, task):
        return (await self.enqueue_many_rollouts([{"input": task}]))[0]

    async def enqueue_many_rollouts(self, requests):
        self._wire.send(BEGIN)
        self._send("expect_latest_resources_version")
        rollouts = []
        for request in requests:
            rollout_id = self._id("ro")
            self._send("insert_rollout", rollout_id=rollout_id, status="queuing", priority=0, input=json.dumps(request["input"]),
                       config="", metadata="", attempts=0)  # fmt: skip
            rollouts.append({"rollout_id": rollout_id})
        self._commit((ENQUEUED, len(rollouts)), news=[len(rollouts), []], dated=True)
        return rollouts

    async def dequeue_rollout(self):
        return (await self.dequeue_many_rollouts(limit=1))[0]

    async def dequeue_many_rollouts(self, limit):
        rows, now = self._read("next_in_queue", limit=limit)
        claimed = []
        for i in range(rows.ntuples):
            seq, attempt_id = rows.get_value(i, 0).decode(), self._id("at")
            self._send("begin_attempt", seq=seq, attempts=1)
            self._send("insert_attempt", rollout=seq, sequence_id=1, attempt_id=attempt_id, start_time=now)
            rollout_id = rows.get_value(i, 1).decode()
            self._claimed[rollout_id] = seq
            claimed.append({"rollout_id": rollout_id, "attempt_id": attempt_id})
        self._commit()
        return claimed

    async def add_span(self, span):
        rollout_id, number = span["rollout_id"], span["sequence_id"]
        if number == 1:
            self._begin_attempt([span])
            return
        seq = self._claimed[rollout_id]
        self._commits += 1
        locked, beat = (rollout_id, seq, "running", 1), (number, SPAN_BYTES, 1, None)
        expected = (1, span["attempt_id"], "running", number - 1, None, "f", None, "", 0, 0, 0, None)
        statement = self._positional(self._queries["insert_expected_span"])
        counted = (self._commits, self._connection)
        self._wire.send(statement, *locked, *beat, *expected, *counted, *self._row(seq, span))
        self._wire.results()

    async def add_many_spans(self, spans):
        mine = {}
        for span in spans:
            mine.setdefault((span["rollout_id"], span["attempt_id"]), []).append(span)
        if len(mine) == 1:
            self._begin_attempt(spans)
            return
        asked = [{"rollout_id": rollout_id, "attempt_id": attempt_id} for rollout_id, attempt_id in mine]
        results, now = self._read_each("get_span_target", asked, "lock_span_writers")
        for target, group in zip(results, mine.values(), strict=True):
            seq = target.get_value(0, 0).decode()
            self._insert(seq, group)
            self._run_attempt(seq, group, now)
        self._commit()

    def _begin_attempt(self, spans):
        """Add the first spans of a claimed attempt, as which the statements expect it."""
        rollout_id = spans[0]["rollout_id"]
        seq = self._claimed[rollout_id]
        self._wire.send(BEGIN)
        self._send("lock_rollout", rollout_id=rollout_id)
        self._send("lock_span_writers")
        ids = {"rollout_id": rollout_id, "attempt_id": spans[0]["attempt_id"], "rollout": seq}
        state = {"rollout_status": "preparing", "status": "preparing", "attempts": 1, "attempt": 1, "last_span": 0}
        outcome = {"rewards": "", "reward_span": 0, "prompt_tokens": 0, "response_tokens": 0, "may_have_indexes": "f"}
        self._send("expect_span_target", **ids, **state, **outcome)
        self._insert(seq, spans)
        self._run_attempt(seq, spans, None)
        self._commit()

    def _run_attempt(self, seq, spans, now):
        counted = {"last_span": spans[-1]["sequence_id"], "bytes": SPAN_BYTES * len(spans), "spans": len(spans)}
        self._send("run_attempt", rollout=seq, sequence_id=1, **counted, now=now, status="running")
        self._send("set_rollout_status", seq=seq, status="running")

    def _insert(self, seq, spans):
        rows = [self._row(seq, span) for span in spans]
        for statement, values in statements_for(rows, self._queries["insert_new_span"]):
            self._wire.send(self._positional(statement), *values)

    async def update_attempt(self, rollout_id, attempt_id, status):
        await self.finish_many([{"rollout_id": rollout_id, "attempt_id": attempt_id}], status)

    async def finish_many(self, claimed, status="succeeded"):
        results, now = self._read_each("get_rollout_with_attempt", claimed)
        for row in results:
            seq = row.get_value(0, 0).decode()
            self._send("set_attempt", rollout=seq, sequence_id=1, status=status, end_time=now, metadata="")
            self._send("finish_rollout", seq=seq, status=status, end_time=now, bytes=10 * SPAN_BYTES, failed=0)
        for one in claimed:
            del self._claimed[one["rollout_id"]]
        n = len(claimed)
        self._commit((SUCCEEDED, n, n, 10 * SPAN_BYTES * n, 10 * n), news=[0, [one["rollout_id"] for one in claimed]])

    async def query_spans(self, rollout_id):
        self._wire.send(BEGIN_READ)
        self._send("select_all_spans", rollout_id=rollout_id)
        self._send("get_span_counters", rollout_id=rollout_id)
        found, _ = [result for result in self._wire.results() if result.nfields]
        self._wire.commit()
        return [self._values(found, i) for i in range(found.ntuples)]

    async def query_many(self, rollout_ids):
        self._wire.send(BEGIN_READ)
        names = ", ".join(f"${i + 1}" for i in range(len(rollout_ids)))
        self._wire.send(f"{self._queries['select_spans_of_latest']} WHERE r.rollout_id IN ({names})", *rollout_ids)
        found = self._wire.commit()[-2]
        answer = {rollout_id: [] for rollout_id in rollout_ids}
        for i in range(found.ntuples):
            row = self._values(found, i)
            answer[row[17].decode()].append(row)
        return answer

    async def close(self):
        self._wire.close()

    def _read(self, query, **parameters):
        """Begin with one look-up; its result, and the time."""
        self._wire.send(BEGIN)
        self._wire.send(NOW)
        self._send(query, **parameters)
        *_, now, found = [result for result in self._wire.results() if result.nfields]
        return found, now.get_value(0, 0).decode()

    def _read_each(self, query, asked, *locks):
        """Begin with the locks of several rollouts and a look-up of each; the results, and the time."""
        self._wire.send(BEGIN)
        self._wire.send(NOW)
        rollouts = [one["rollout_id"] for one in asked]
        if len(rollouts) == 1:
            self._send("lock_rollout", rollout_id=rollouts[0])
        else:
            self._send("lock_rollouts", rollout_ids=f"{{{','.join(rollouts)}}}")
        for lock in locks:
            self._send(lock)
        for one in asked:
            self._send(query, **one)
        now, *found = [result for result in self._wire.results() if result.nfields]
        return found[-len(asked) :], now.get_value(0, 0).decode()

    def _commit(self, total=("SELECT count_commit($1, $2)",), news=None, *, dated=False):
        self._commits += 1
        told = () if news is None else ("leyden_leyden", json.dumps(["floor", *news, False]))
        self._wire.send(*total, self._connection, self._commits, *told)
        if dated:
            self._wire.send(NOW)
        self._wire.commit()

    def _send(self, query, **parameters):
        text, names = self._numbered[query]
        self._wire.send(text, *(parameters.get(name) for name in names))

    def _positional(self, statement):
        if statement not in self._numbered:
            self._numbered[statement] = numbered(statement)
        return self._numbered[statement][0]

    def _row(self, seq, span):
        ids = (seq, 1, span["sequence_id"], span["span_id"], span["trace_id"], None, span["name"])
        said = ("INTERNAL", "UNSET", None, span["start_time"], span["end_time"])
        return (*ids, *said, None, None, json.dumps(span["attributes"]), "", "")

    def _values(self, result, row):
        values = [result.get_value(row, column) for column in range(result.nfields)]
        values[14] = json.loads(values[14])
        return values

    def _id(self, kind):
        self._ids += 1
        return f"{kind}-{os.getpid():x}-{self._ids:x}"
