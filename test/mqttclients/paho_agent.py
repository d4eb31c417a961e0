"""The agent of paho-mqtt (agent_test.go)."""

import threading

from paho.mqtt import client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode

import python_agent as agent

clients = {}
PATIENCE = 60


def connect(r):
    v5 = r["protocol"] == 5
    c = paho.Client(
        paho.CallbackAPIVersion.VERSION2, client_id=r["client"], protocol=paho.MQTTv5 if v5 else paho.MQTTv311,
        clean_session=None if v5 else r["clean"], transport="websockets" if r["webSocket"] else "tcp")
    clients[r["client"]] = c
    c.reconnect_delay_set(1, 1)
    if will := r.get("will"):
        c.will_set(will["topic"], will["payload"], will["qos"], will["retain"], agent.will_properties(r))
    connected, granted, refused = threading.Event(), threading.Semaphore(0), []

    def on_connect(_client, _userdata, flags, reason, _properties):
        if reason.is_failure:
            refused.append(reason)
        else:
            agent.write(client=r["client"], connected=True, session=flags.session_present)
        connected.set()

    def on_subscribe(_client, _userdata, _mid, reasons, _properties):
        refused.extend(reason for reason in reasons if reason.is_failure)
        granted.release()

    c.on_connect, c.on_subscribe = on_connect, on_subscribe
    c.on_message = lambda _client, _userdata, m: agent.message(r["client"], m)
    clean = {"clean_start": r["clean"], "properties": agent.connect_properties(r)} if v5 else {}
    c.connect("127.0.0.1", r["port"], **clean)
    c.loop_start()
    if not connected.wait(PATIENCE) or refused:
        raise RuntimeError(f"not connected: {refused}")
    for s in r.get("subscriptions") or []:
        c.subscribe(s["filter"], **agent.subscribe_arguments(r["protocol"], s))
        if not granted.acquire(timeout=PATIENCE) or refused:
            raise RuntimeError(f"not subscribed: {refused}")


def publish(r):
    c = clients[r["client"]]
    sent = []
    for m in r["messages"]:
        sent.append(c.publish(m["topic"], m["payload"], m["qos"], m["retain"], agent.publish_properties(m)))
    for info in sent:
        info.wait_for_publish(PATIENCE)
        if not info.is_published():
            raise RuntimeError("not acknowledged")


def disconnect(r):
    c = clients.pop(r["client"])
    c.disconnect(ReasonCode(PacketTypes.DISCONNECT, identifier=4) if r.get("wantWill") else None)
    c.loop_stop()


def answer(r):
    try:
        {"connect": connect, "publish": publish, "disconnect": disconnect}[r["request"]](r)
        agent.reply(r)
    except Exception as error:  # pylint: disable=broad-except
        agent.reply(r, error)


for request in agent.requests():
    threading.Thread(target=answer, args=(request,), daemon=True).start()
