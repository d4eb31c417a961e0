// The agent of MQTT.js: it reads requests from standard input and writes replies and events to standard output, one JSON
// object a line (agent_test.go).
'use strict'
const mqtt = require('mqtt')
const readline = require('readline')

const clients = new Map()
const write = (object) => process.stdout.write(JSON.stringify(object) + '\n')

function fromPacket(topic, payload, packet) {
  const p = packet.properties || {}
  return {
    topic, payload: payload.toString(), qos: packet.qos, retain: packet.retain,
    user: { ...p.userProperties }, contentType: p.contentType, responseTopic: p.responseTopic,
    correlation: p.correlationData && p.correlationData.toString(), expiry: p.messageExpiryInterval,
    utf8: p.payloadFormatIndicator, identifier: p.subscriptionIdentifier,
  }
}

function properties(m) {
  const p = {}
  if (m.user) p.userProperties = m.user
  if (m.contentType) p.contentType = m.contentType
  if (m.responseTopic) p.responseTopic = m.responseTopic
  if (m.correlation) p.correlationData = Buffer.from(m.correlation)
  if (m.expiry) p.messageExpiryInterval = m.expiry
  if (m.utf8) p.payloadFormatIndicator = true
  return p
}

async function connect(r) {
  const v5 = r.protocol === 5
  const options = {
    protocol: r.webSocket ? 'ws' : 'mqtt', path: '/mqtt', host: '127.0.0.1', port: r.port, protocolVersion: r.protocol, clientId: r.client, clean: r.clean, reconnectPeriod: 200,
  }
  if (v5) options.properties = { sessionExpiryInterval: r.expiry || 0, receiveMaximum: r.receiveMaximum }
  if (r.will) {
    options.will = { topic: r.will.topic, payload: r.will.payload, qos: r.will.qos, retain: r.will.retain }
    if (v5) options.will.properties = { willDelayInterval: r.will.delay || 0 }
  }
  const client = mqtt.connect(options)
  clients.set(r.client, client)
  client.on('message', (topic, payload, packet) => write({ client: r.client, message: fromPacket(topic, payload, packet) }))
  let last = new Error('not connected')
  client.on('error', (err) => { last = err })
  client.on('connect', (ack) => write({ client: r.client, connected: true, session: ack.sessionPresent }))
  await new Promise((resolve, reject) => {
    client.once('connect', resolve)
    client.once('end', () => reject(last))
  })
  for (const s of r.subscriptions || []) {
    const options = { qos: s.qos, nl: s.noLocal, rap: s.retainAsPublished, rh: s.retainHandling }
    if (s.identifier) options.properties = { subscriptionIdentifier: s.identifier }
    await client.subscribeAsync(s.filter, options)
  }
}

async function publish(r) {
  const client = clients.get(r.client)
  await Promise.all(r.messages.map((m) =>
    client.publishAsync(m.topic, m.payload, { qos: m.qos, retain: m.retain, properties: properties(m) })))
}

async function disconnect(r) {
  const client = clients.get(r.client)
  clients.delete(r.client)
  await client.endAsync(!client.connected, r.wantWill ? { reasonCode: 4 } : {})
}

const requests = { connect, publish, disconnect }
readline.createInterface({ input: process.stdin })
  .on('line', async (line) => {
    const r = JSON.parse(line)
    try {
      await requests[r.request](r)
      write({ id: r.id })
    } catch (err) {
      write({ id: r.id, error: String(err) })
    }
  })
  .on('close', () => process.exit(0))
