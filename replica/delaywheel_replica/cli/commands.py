"""The list of commands.

What does a command's work is imported when it runs: printing the version, showing help or
completing a word needs nothing of gRPC, Kafka or numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from delaywheel_replica.cli import arguments, options
from delaywheel_replica.cli.parsing import Command, CommandGroup

PLUGIN_GROUP: Final = "delaywheel.commands"
"""Entry points of other packages' commands: each leads to a `Command`."""

_DOING = "delaywheel_replica.cli.doing"

_DEAD: Final = (
    "This asks Kafka: that of the node that answers, or of --kafka with --cluster or "
    "--dead-topic, or of --config."
)

COMMANDS: Final[Mapping[str, Command | CommandGroup]] = {
    "init": Command(
        "Write the settings that each node of a new cluster starts with.",
        f"{_DOING}.init.command:init",
        arguments.init,
        "A folder for each node: its settings, rights to begin with, and with --systemd a unit; "
        "and what Kafka's administrator does, as commands. All of it or, if something is wrong, "
        "nothing is written, and nothing is overwritten. Kafka is asked as by `config check "
        "--connect`; whatever it answers is a warning. The certificates of --dev-certs are read "
        "where they are written: for a trial on one machine.",
        """
            # The nodes' names are those of their machines
            delaywheel init --kafka broker:9092 --cluster shop \\
              --nodes delay-1,delay-2,delay-3 --systemd --out ./shop

            # And where they are not
            delaywheel init --kafka broker:9092 --cluster shop \\
              --nodes n1=10.0.0.1,n2=10.0.0.2,n3=10.0.0.3 --out ./shop

            # A trial on one machine, with certificates for 30 days
            delaywheel init --kafka broker:9092 --cluster shop \\
              --nodes n1=127.0.0.1,n2=127.0.0.2,n3=127.0.0.3 --dev-certs --out ./shop
        """,
    ),
    "serve": Command(
        "Run one node in the foreground until SIGTERM or Ctrl-C, which stop it cleanly.",
        f"{_DOING}.serve:serve",
        options.config,
        examples="""
            # A node alone, beside a Kafka of yours
            delaywheel serve --set cluster_id=a --set node_id=n1 --set data_dir=./n1 \\
              --set kafka.bootstrap.servers=127.0.0.1:9092

            # From a file, with one setting that wins over it
            delaywheel serve --config node.toml --set log_level=debug
        """,
    ),
    "produce": Command(
        "Send a message that becomes visible in its topic at its due; prints its handle.",
        f"{_DOING}.produce:produce",
        arguments.produce,
        "Only handles go to standard output, all else to standard error. With --lines or --jsonl "
        "many messages are sent, thousands in a request; a handle is printed for each that is "
        "accepted, in order, and with --ndjson an object for each line, also where it failed. All "
        "lines are sent even if whoever reads the handles ends before. A carriage return at a "
        "line's end is no part of the line; --jsonl passes over blank lines.\n\n"
        "The fields of a line of --jsonl: value or value_base64, which must be there, if only as "
        "null, topic, key or key_base64, headers (an object, or a list of pairs), one of delay, at "
        "and level, id, partition, timestamp. "
        "The options are the defaults for each line. A line with an id and an at is safe to "
        "send again.",
        """
            # In half an hour
            handle=$(delaywheel produce orders 'still there?' --key 42 --delay 30m)

            # Tomorrow at nine, wherever this machine is
            delaywheel produce orders hello --at '2030-01-31 09:00 Europe/Berlin'

            # The value from another program
            date | delaywheel produce orders - --level 5m --header source=cron

            # A message for each line of a file, or as another program writes them
            delaywheel produce orders --lines orders.txt --delay 1h >handles
            tail -f orders.jsonl | delaywheel produce orders --jsonl - --delay 1h --ndjson
        """,
    ),
    "slots": Command(
        "List the seconds that hold messages, of all nodes: each message once.",
        f"{_DOING}.pending.slots:slots",
        arguments.slots,
        "Pending are messages that are neither delivered nor cancelled. Written counts those too, "
        "until the second's file is deleted, shortly after the due; a message that was sent twice "
        "counts twice until its due. Copies: how many nodes hold as much of the second as shown.",
        """
            # What is due in the next hour
            delaywheel slots --from now --to now+1h

            # The fullest seconds
            delaywheel slots --ndjson | jq -r '[.pending, .slot] | @tsv' | sort -rn | head

            # Of a node that does not run
            delaywheel slots --data /var/lib/delaywheel
        """,
    ),
    "slot": Command(
        "List the messages of one second, as one node sees them.",
        f"{_DOING}.pending.slots:slot",
        arguments.slot,
        examples="""
            delaywheel slot 1900000000
            delaywheel slot 2030-03-17T17:46:40Z --content

            # The handles of what waits there for one topic
            delaywheel slot 1900000000 --limit 100000 --ndjson |
              jq -r 'select(.topic == "orders" and .state == "pending") | .handle'
        """,
    ),
    "search": Command(
        "List pending messages by topic, key, header, id or due, as one node sees them.",
        f"{_DOING}.pending.search:search",
        arguments.search,
        "There is no index: the node reads second after second, so the cost grows with "
        "the messages pending between --from and --to. It reports what was not examined.",
        """
            delaywheel search --topic orders --key 42
            delaywheel search --header trip=7 --from now --to now+1d --content

            # By the id alone
            delaywheel search --id 0190163d-8694-739b-8d3f-8a4d6a1f5d10 --json |
              jq -r .messages[].handle
        """,
    ),
    "get": Command(
        "Show one message with its content, until its second is deleted.",
        f"{_DOING}.pending.messages:get",
        arguments.one_message,
        examples="""
            delaywheel get "$handle"
            delaywheel get --topic orders --id 0190163d-8694-739b-8d3f-8a4d6a1f5d10 \\
              --due 2030-01-31T12:00:00Z
            delaywheel get "$handle" --json | jq -r .value | base64 -d
        """,
    ),
    "export": Command(
        "Print pending messages as lines for `produce --jsonl`, to move them to another cluster.",
        f"{_DOING}.pending.export:export",
        arguments.export,
        "Ids and dues stay. The first run changes nothing; the second one cancels here what the "
        "first has listed, and prints the messages that are never delivered here: exactly those "
        "are sent elsewhere. It may be repeated, into a new file. What falls due meanwhile is "
        "delivered here.",
        """
            # A look, or a copy that can be read
            delaywheel export --topic orders > pending.jsonl

            # Each message once: what is due in the next ten minutes stays here
            delaywheel export --from now+10m > pending.jsonl
            delaywheel export --cancel pending.jsonl > moved.jsonl
            delaywheel produce --jsonl moved.jsonl --server 10.0.1.1:7420
        """,
    ),
    "cancel": Command(
        "Cancel a pending message, or many; exit code 0 only if none is delivered.",
        f"{_DOING}.pending.cancel:cancel",
        arguments.cancel,
        "Without a handle, or a topic with id and due, the command applies to all pending messages "
        "that match: it lists them, asks, and cancels each one separately. It reports which were "
        "too late, which outcomes are unknown, and what was not examined.",
        """
            delaywheel cancel "$handle" || echo "too late, or not known"

            # All of a customer's
            delaywheel cancel --topic reminders --key 42 --dry-run
            delaywheel cancel --topic reminders --key 42 --yes

            # By the id alone
            delaywheel cancel --id 0190163d-8694-739b-8d3f-8a4d6a1f5d10 --from now --to now+1d
        """,
    ),
    "reschedule": Command(
        "Give a pending message another due; prints its new handle.",
        f"{_DOING}.pending.reschedule:reschedule",
        arguments.reschedule,
        "It is delivered at one of the two dues, never at both. Exit code 0 only if it has "
        "another due now. If the outcome is unknown (4), repeat the command to find out.",
        """
            handle=$(delaywheel reschedule "$handle" --delay 2h)
        """,
    ),
    "whoami": Command(
        "Show who the node takes this user for, and what is granted.",
        f"{_DOING}.whoami:whoami",
        arguments.whoami,
        examples="""
            delaywheel whoami --profile prod
        """,
    ),
    "status": Command(
        "Show whether the cluster works, and the state of each node and copy.",
        f"{_DOING}.status:status",
        arguments.status,
        "The first line is the verdict: OK, DEGRADED or DOWN, with its causes. Every node is "
        "asked, through the one that answers. Elections and in-sync changes are "
        "counted since the node's processes started.",
        """
            delaywheel status
            delaywheel status --check --short || alert

            # After a start or a change
            delaywheel status --wait ok --timeout 2m --short

            # While something is done to it
            delaywheel status --watch
            delaywheel status --json | jq .lateness_ms
        """,
    ),
    "web": Command(
        "Show the cluster in a browser until SIGTERM or Ctrl-C; prints the link.",
        "delaywheel_replica.web.command:web",
        arguments.web,
        "Who looks signs in: with a bearer token of the nodes' tokens, which each call carries, "
        "or, where nodes have no grants, by the printed link, whose secret is of this start. Other "
        "machines reach it with --listen; that needs TLS, and nodes with grants. One a cluster is "
        "enough: it asks nodes only while somebody looks. Exit code 78: started like this, it "
        "would be open to others.",
        """
            # For this machine
            delaywheel web --server 127.0.0.1:7420

            # For others, with a certificate
            delaywheel web --listen 0.0.0.0:7423 --host ops.example.org \\
              --page-cert page.pem --page-key page.key --profile prod
        """,
    ),
    "verify": Command(
        "Check every frame of a data folder; exit code 1 and every finding by place if one is bad.",
        f"{_DOING}.verify:verify",
        arguments.verify,
        "It changes nothing. While the node runs, what is just being written may show as the "
        "unfinished end of a file.",
        """
            delaywheel verify /var/lib/delaywheel
        """,
    ),
    "doctor": Command(
        "Look for what is wrong with a node and its cluster; with --bundle, for others to read.",
        f"{_DOING}.doctor.command:doctor",
        arguments.doctor,
        "It does what `config check --connect` does, and judges the status of all nodes, their "
        "versions and clocks, and how late this node's server comes to its work. It changes "
        "nothing. Exit codes as there. The bundle has all that, settings, metrics, status, the "
        "control topic, and the names in the data folder: no key, value or header of a message, "
        "no password, token or private key. It is listed before it is written.",
        """
            delaywheel doctor --config node.toml

            # For whoever helps, with the end of the node's log
            journalctl -u delaywheel -n 5000 >node.log
            delaywheel doctor --config node.toml --log node.log --bundle report.tar.gz
        """,
    ),
    "config": CommandGroup(
        "Check or show the settings that serve would use.",
        {
            "check": Command(
                "Check the settings; exit code 1 and every fault if they are not in order.",
                f"{_DOING}.config:check",
                arguments.config_check,
                "With --connect it also looks at this machine (disk, descriptors, clock, ports), "
                "connects to the other nodes, and asks Kafka about its brokers, the topics and "
                "what the node may do there; of each it says what to do. It changes nothing, and "
                "disturbs no running node. Exit code 1: something must be corrected; 3: Kafka "
                "does not answer; warnings do not change it.",
                """
                    # Before a node is started with them
                    delaywheel config check --config node.toml
                    delaywheel config check --config node.toml --set span_seconds=86400

                    # Where it will run, as the user it will run as
                    delaywheel config check --config node.toml --connect --topic orders
                """,
            ),
            "show": Command(
                "Show every setting as TOML, defaults included; secrets are masked.",
                f"{_DOING}.config:show",
                arguments.config_show,
                examples="""
                    # What serve would use, as a file that it takes again
                    delaywheel config show --config node.toml
                    delaywheel config show --config node.toml --json | jq .kafka
                """,
            ),
        },
    ),
    "clock": CommandGroup(
        "Continue forwarding at the clock, after a leader's clock was ahead.",
        {
            "set-back": Command(
                "Continue at the leader's corrected clock now, instead of resting until then.",
                f"{_DOING}.clock:set_back",
                arguments.confirmed,
                "It shows the consequences, asks, and does exactly that.",
                """
                    # The consequences are shown first; n answers no
                    delaywheel clock set-back --server 127.0.0.1:7420
                """,
            ),
        },
    ),
    "node": CommandGroup(
        "Replace a node's data folder, remove a node, or wait until a node may be stopped.",
        {
            "replace": Command(
                "Register the data folder on which NODE runs now, instead of the previous one.",
                f"{_DOING}.nodes:replace",
                arguments.node_replace,
                "It shows the consequences, asks, and does exactly that.",
                """
                    # n2 was started on an empty folder, since its disk is gone
                    delaywheel node replace n2
                """,
            ),
            "remove": Command(
                "Remove NODE for good, once it is stopped and in no node's members: the cluster "
                "no longer waits for it.",
                f"{_DOING}.nodes:remove",
                arguments.node_remove,
                "It shows the consequences, asks, and does exactly that.",
                """
                    # n4 is stopped, and no longer in any node's members
                    delaywheel node remove n4
                """,
            ),
            "wait": Command(
                "Wait until NODE may be stopped, or its disk exchanged.",
                f"{_DOING}.nodes:wait",
                arguments.node_wait,
                "It may be once every node answers, one leads, no message is on one node only, all "
                "copies but its own are complete, and enough other nodes take messages. What it "
                "waits for goes to standard error. Exit code 1 if that takes too long.",
                """
                    # n2 is restarted next
                    delaywheel node wait n2 --up-to 10m
                """,
            ),
        },
    ),
    "tail": Command(
        "Show messages as they appear in their topics, with due, lateness, id and headers.",
        f"{_DOING}.kafka.tail:tail",
        arguments.tail,
        "It reads as a careful consumer does (isolation.level=read_committed), joins no group, "
        "and shows what others sent to the topic, too. Lateness is from the due to the moment "
        "of forwarding. It goes on until Ctrl-C, unless --count or --until-end ends it. "
        "This asks Kafka itself: that of the node that answers, or of --kafka or --config.",
        """
            # What appears from now on
            delaywheel tail orders

            # The last five, and then what appears
            delaywheel tail orders baskets --last 5

            # Everything that is there now, for another program
            delaywheel tail orders --from-beginning --until-end --json | jq -r .value | base64 -d
        """,
    ),
    "topic": CommandGroup(
        "Create topics in Kafka.",
        {
            "create": Command(
                "Create missing topics; existing ones stay as they are.",
                f"{_DOING}.kafka.topics:create",
                arguments.topic_create,
                "This asks Kafka itself: that of the node that answers, or of --kafka or --config.",
                """
                    # In the Kafka of the node at 127.0.0.1:7420
                    delaywheel topic create orders

                    # Where no node runs yet
                    delaywheel topic create orders --kafka 127.0.0.1:9092

                    # As a cluster's nodes reach their Kafka
                    delaywheel topic create orders baskets --partitions 12 \\
                      --replication-factor 3 --config node.toml
                """,
            ),
        },
    ),
    "dead": CommandGroup(
        "Look at dead letters, send them again, or mark them as dealt with.",
        {
            "list": Command(
                "List waiting dead letters, and count them by topic and reason.",
                f"{_DOING}.kafka.dead:list_letters",
                arguments.dead_list,
                _DEAD,
                """
                    delaywheel dead list
                    delaywheel dead list --cluster shop --kafka 127.0.0.1:9092
                    delaywheel dead list --config node.toml --reason EXPIRED --from now-1d
                    delaywheel dead list --config node.toml --counts --json | jq .counts
                """,
            ),
            "show": Command(
                "Show one dead letter with its content, and whether it was replayed or dropped.",
                f"{_DOING}.kafka.dead:show",
                arguments.dead_show,
                examples="""
                    delaywheel dead show 0:1204 --config node.toml
                """,
            ),
            "replay": Command(
                "Send the messages of dead letters to their topics again, each once.",
                f"{_DOING}.kafka.dead:replay",
                arguments.dead_replay,
                "A letter and its mark are one transaction: repeat the command after any "
                "failure, and nothing is sent twice. Without --execute letters are only "
                f"counted. {_DEAD}",
                """
                    delaywheel dead replay 0:1204 --config node.toml --execute
                    delaywheel dead replay --topic orders --reason TOPIC_MISSING --config node.toml
                    delaywheel dead replay --topic orders --reason TOPIC_MISSING \\
                      --config node.toml --execute
                """,
            ),
            "drop": Command(
                "Mark dead letters as dealt with, and send nothing.",
                f"{_DOING}.kafka.dead:drop",
                arguments.dead_drop,
                "They stay in their topic for as long as Kafka keeps them; `list` shows them with "
                "--all, and they are not replayed. Without --execute letters are only counted. "
                f"{_DEAD}",
                """
                    delaywheel dead drop --reason EXPIRED --to now-7d --config node.toml --execute
                """,
            ),
        },
    ),
    "completion": Command(
        "Print the script that lets bash or zsh complete commands and options.",
        "delaywheel_replica.cli.completing:script",
        arguments.completion,
        examples="""
            # In ~/.bashrc
            source <(delaywheel completion bash)

            # In ~/.zshrc
            source <(delaywheel completion zsh)
        """,
    ),
}


def all_commands() -> dict[str, Command | CommandGroup]:
    """Returns our commands, and those of other packages."""
    return {**COMMANDS, **{plugin.name: plugin.load() for plugin in _plugins()}}


def find(name: str) -> Command | CommandGroup | None:
    """Returns the command of this name; searches other packages only if it is not ours."""
    ours = COMMANDS.get(name)
    if ours is not None:
        return ours
    for plugin in _plugins():
        if plugin.name == name:
            found: Command = plugin.load()
            return found
    return None


def _plugins() -> Any:
    # Only here: it reads the metadata of every installed package.
    from importlib.metadata import entry_points  # noqa: PLC0415

    return entry_points(group=PLUGIN_GROUP)
