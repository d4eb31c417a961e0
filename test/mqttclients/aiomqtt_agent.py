"""The agent of aiomqtt (agent_test.go). It reconnects as aiomqtt's documentation shows: in a loop around the client."""

import asyncio

import aiomqtt

import python_agent as agent

clients = {}


class Session:
    """A client with the task that keeps it connected and receives its messages."""

    def __init__(self, r):
        v5 = r["protocol"] == 5
        self.name = r["client"]
        will = r.get("will")
        if will:
            will = aiomqtt.Will(will["topic"], will["payload"], will["qos"], will["retain"], agent.will_properties(r))
        clean = {"clean_start": r["clean"], "properties": agent.connect_properties(r)} if v5 else {"clean_session": r["clean"]}
        self.client = aiomqtt.Client(
            "127.0.0.1", r["port"], identifier=self.name, will=will, timeout=60,
            protocol=aiomqtt.ProtocolVersion.V5 if v5 else aiomqtt.ProtocolVersion.V311, **clean)
        self.client.pending_calls_threshold = 4096  # no warnings about bursts
        self.up = asyncio.Event()
        self.task = asyncio.create_task(self.run())

    async def run(self):
        while True:
            try:
                async with self.client:
                    agent.write(client=self.name, connected=True)
                    self.up.set()
                    async for m in self.client.messages:
                        agent.message(self.name, m)
            except aiomqtt.MqttError:
                await asyncio.sleep(0.2)


async def connect(r):
    session = clients[r["client"]] = Session(r)
    await session.up.wait()
    for s in r.get("subscriptions") or []:
        await session.client.subscribe(s["filter"], **agent.subscribe_arguments(r["protocol"], s))


async def publish(r):
    client = clients[r["client"]].client
    await asyncio.gather(*(
        client.publish(m["topic"], m["payload"], m["qos"], m["retain"], agent.publish_properties(m)) for m in r["messages"]))


async def disconnect(r):
    session = clients.pop(r["client"])
    session.task.cancel()
    await asyncio.wait([session.task])


async def answer(r):
    try:
        await {"connect": connect, "publish": publish, "disconnect": disconnect}[r["request"]](r)
        agent.reply(r)
    except Exception as error:  # pylint: disable=broad-except
        agent.reply(r, error)


async def main():
    lines = agent.requests()
    tasks = set()
    while r := await asyncio.to_thread(next, lines, None):
        task = asyncio.create_task(answer(r))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


asyncio.run(main())
