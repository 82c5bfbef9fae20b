"""What this machine can do at all: the bare minimum of a stream queue, without records, results or events.

Two processes, a plain redis-py connection each, one script a message that acknowledges and deletes the last
message and reads the next (XACK, XDEL, XREADGROUP). Nothing that loses no task can be faster with one
connection a process; figures of other machines and other hours compare by their ratio to this one.

    python -m benchmarks.reference --messages 20000 --procs 2
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.queues import SimpleQueue

from benchmarks.stage import machine
from dtq_child.connection import connector, open_link
from dtq_supervisor import embedded

STREAM, GROUP = "reference", "workers"
FUSED = """
if ARGV[2] ~= '' then
  redis.call('XACK', KEYS[1], 'workers', ARGV[2])
  redis.call('XDEL', KEYS[1], ARGV[2])
end
return redis.call('XREADGROUP', 'GROUP', 'workers', ARGV[1], 'COUNT', 1, 'STREAMS', KEYS[1], '>')
"""


def consume(url: str, name: str, ready: SimpleQueue[str], go: SimpleQueue[str]) -> None:
    sha = open_link(url).call("SCRIPT", "LOAD", FUSED)
    connection = connector(url)()
    connection.connect()
    ready.put(name)
    go.get()
    last = b""
    while True:
        command = connection.pack_command("EVALSHA", sha, 1, STREAM, name, last)
        connection.send_packed_command(command, check_health=False)
        got = connection.read_response()
        if not got:
            break
        last = got[0][1][0][0]
    ready.put(name)


def measure(url: str, messages: int, procs: int) -> float:
    """Messages a second drained by `procs` processes."""
    link = open_link(url)
    link.call("DEL", STREAM)
    link.call("XGROUP", "CREATE", STREAM, GROUP, "0", "MKSTREAM")
    for number in range(messages):
        link.call("XADD", STREAM, "*", "task", str(number))
    context = multiprocessing.get_context("spawn")
    ready, go = context.SimpleQueue(), context.SimpleQueue()
    workers = [context.Process(target=consume, args=(url, f"c{n}", ready, go)) for n in range(procs)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.get()
    begun = time.perf_counter()
    for _ in workers:
        go.put("go")
    for _ in workers:
        ready.get()
    seconds = time.perf_counter() - begun
    for worker in workers:
        worker.join()
    return messages / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print(machine())
    with embedded.start() as server:
        for _ in range(args.runs):
            print(f"  {measure(server.url, args.messages, args.procs):8.0f} messages/s", flush=True)


if __name__ == "__main__":
    main()
