// Package mqttclients is the acceptance test of the embedded broker: MQTT clients that others wrote, unmodified, do over TCP
// and WebSocket what their users do, with the embedded broker and with Debian's mosquitto, which shows that a check itself is right.
//
//	checks_test.go ─▶ program ─┬─▶ agent_test.go ─▶ mqttjs.cjs, paho_agent.py, aiomqtt_agent.py   JSON lines
//	                           ├─▶ autopaho_test.go                                               in the test's process
//	                           └─▶ mosquitto_test.go ─▶ mosquitto_pub, mosquitto_sub              arguments
//
// The checks know no client. The list skips has what a client cannot express, such as an option that its command line does not
// have, and known faults of mosquitto and of clients, each with the reason.
//
// make test-mqtt installs the clients, whose versions package-lock.json and requirements.txt pin. Begin reading with TestClients.
package mqttclients
