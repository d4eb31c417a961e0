"""What the agents of the Python clients share: requests and events as JSON lines (agent_test.go), and properties."""

import json
import sys
import threading

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

_lock = threading.Lock()


def write(**event):
    """Writes a reply or an event as one line."""
    with _lock:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def reply(request, error=None):
    """Ends a request. Without an error it has succeeded."""
    write(id=request["id"], error=error and f"{type(error).__name__}: {error}")


def requests():
    """Yields the requests from standard input until it is closed."""
    for line in sys.stdin:
        yield json.loads(line)


def _properties(kind, **values):
    p = Properties(kind)
    for name, value in values.items():
        if value:
            setattr(p, name, value)
    return p


def connect_properties(r):
    """Returns the properties of CONNECT, which MQTT 3.1.1 does not have."""
    if r["protocol"] != 5:
        return None
    return _properties(PacketTypes.CONNECT, SessionExpiryInterval=r.get("expiry"), ReceiveMaximum=r.get("receiveMaximum"))


def will_properties(r):
    """Returns the properties of a will, which MQTT 3.1.1 does not have."""
    return _properties(PacketTypes.WILLMESSAGE, WillDelayInterval=r["will"].get("delay")) if r["protocol"] == 5 else None


def publish_properties(m):
    """Returns the properties of a message, or None if it has none."""
    p = _properties(
        PacketTypes.PUBLISH, UserProperty=list(m.get("user", {}).items()), ContentType=m.get("contentType"),
        ResponseTopic=m.get("responseTopic"), CorrelationData=m.get("correlation", "").encode(),
        MessageExpiryInterval=m.get("expiry"), PayloadFormatIndicator=int(m.get("utf8", False)))
    return None if p.isEmpty() else p


def subscribe_arguments(protocol, s):
    """Returns the arguments of subscribe that both clients name alike."""
    if protocol != 5:
        return {"qos": s["qos"]}
    properties = _properties(PacketTypes.SUBSCRIBE, SubscriptionIdentifier=s.get("identifier"))
    options = SubscribeOptions(
        qos=s["qos"], noLocal=s.get("noLocal", False), retainAsPublished=s.get("retainAsPublished", False),
        retainHandling=s.get("retainHandling", 0))
    return {"options": options, "properties": None if properties.isEmpty() else properties}


def message(client, m):
    """Writes a received message as an event."""
    p = m.properties.json() if m.properties else {}
    write(client=client, message={
        "topic": str(m.topic), "payload": m.payload.decode(), "qos": m.qos, "retain": bool(m.retain),
        "user": dict(p.get("UserProperty", [])), "contentType": p.get("ContentType"), "responseTopic": p.get("ResponseTopic"),
        "correlation": bytes.fromhex(p.get("CorrelationData", "")).decode(), "expiry": p.get("MessageExpiryInterval"),
        "utf8": bool(p.get("PayloadFormatIndicator")), "identifier": p.get("SubscriptionIdentifier", [None])[0]})
