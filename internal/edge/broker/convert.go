package broker

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.etcd.io/bbolt"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// bucket1 is the bucket of the first version of the store. It has the same kinds of keys, without b and w, and packet
// identifiers in place of orders.
var bucket1 = []byte("mqtt/v1")

// The values of bucket1, as far as they are converted.
type (
	session1 struct {
		Username   []byte `json:"username"`
		Level      byte   `json:"protocolVersion"`
		Properties struct {
			SessionExpiry uint32 `json:"sessionExpiryInterval"`
		} `json:"properties"`
	}
	subscription1 struct {
		QoS               byte   `json:"qos"`
		NoLocal           bool   `json:"no_local"`
		RetainHandling    byte   `json:"retain_handling"`
		RetainAsPublished bool   `json:"retain_as_pub"`
		ID                uint32 `json:"identifier"`
	}
	message1 struct {
		Header struct {
			Type   byte `json:"type"`
			QoS    byte `json:"qos"`
			Retain bool `json:"retain"`
		} `json:"fixedheader"`
		Properties struct {
			ContentType     string `json:"contentType"`
			ResponseTopic   string `json:"responseTopic"`
			CorrelationData []byte `json:"correlationData"`
			User            []struct {
				Key   string `json:"k"`
				Value string `json:"v"`
			} `json:"user"`
		} `json:"properties"`
		Topic   string `json:"topic_name"`
		Payload []byte `json:"payload"`
		Origin  string `json:"origin"`
		Created int64  `json:"created"`
		ID      uint16 `json:"packet_id"`
	}
)

// convert replaces bucket1 by bucket. The first version stored no times, so sessions and messages expire from now on, or
// not at all. Values that the first version could not have read either are left out.
func convert(tx *bbolt.Tx, now time.Time) error {
	from := tx.Bucket(bucket1)
	to, err := tx.CreateBucketIfNotExists(bucket)
	if err != nil {
		return err
	}
	c := converter{to: to, now: now}
	err = from.ForEach(func(k, v []byte) error {
		if len(k) == 0 {
			return nil
		}
		return c.value(string(k[:1]), string(k[1:]), v)
	})
	if err == nil {
		err = c.putMessages()
	}
	return errors.Join(err, tx.DeleteBucket(bucket1))
}

type converter struct {
	to     *bbolt.Bucket
	now    time.Time
	last   uint64
	queued map[string][]message1 // by client
}

func (c *converter) put(key string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return c.to.Put([]byte(key), data)
}

func (c *converter) value(kind, key string, v []byte) error {
	var session session1
	var sub subscription1
	var m message1
	switch {
	case kind == clientKey && json.Unmarshal(v, &session) == nil:
		expiry := 7 * 24 * time.Hour
		if session.Level >= 5 {
			expiry = time.Duration(session.Properties.SessionExpiry) * time.Second
		}
		return c.put(clientKey+key, sessionRecord{User: string(session.Username), Expiry: expiry, Ended: c.now})
	case kind == subKey && json.Unmarshal(v, &sub) == nil:
		return c.put(subKey+key, subscriptionRecord{sub.QoS, sub.NoLocal, sub.RetainAsPublished, sub.RetainHandling, sub.ID})
	case kind == receivedKey:
		return c.to.Put([]byte(receivedKey+key), nil)
	case kind == retainedKey && json.Unmarshal(v, &m) == nil:
		id, err := c.body(m)
		return errors.Join(err, c.put(retainedKey+key, id))
	case kind == messageKey && json.Unmarshal(v, &m) == nil:
		client, id, _ := strings.Cut(key, nul)
		if packet.Type(m.Header.Type) == packet.PUBREC { // from before there was receivedKey
			return c.to.Put([]byte(receivedKey+client+nul+id), nil)
		}
		if c.queued == nil {
			c.queued = map[string][]message1{}
		}
		c.queued[client] = append(c.queued[client], m)
	}
	return nil
}

// putMessages puts the messages for each client in the order of their arrival.
func (c *converter) putMessages() error {
	for client, messages := range c.queued {
		slices.SortFunc(messages, func(a, b message1) int { return cmp.Compare(a.Created, b.Created) })
		for i, m := range messages {
			body, err := c.body(m)
			if err != nil {
				return err
			}
			// The identifiers of messages with QoS 2 go on, because the client may have the message.
			e := entryRecord{Message: body, QoS: max(m.Header.QoS, 1), Retain: m.Header.Retain,
				Released: packet.Type(m.Header.Type) == packet.PUBREL}
			if e.Released {
				e.QoS = 2
			}
			if e.QoS == 2 {
				e.ID, e.Dup = m.ID, true
			}
			if err := c.put(messageKey+client+nul+number(uint64(i+1)), e); err != nil {
				return fmt.Errorf("client %q: %w", client, err)
			}
		}
	}
	return nil
}

func (c *converter) body(m message1) (uint64, error) {
	p := &packet.Properties{}
	if m.Properties.ContentType != "" {
		p.SetText(packet.ContentType, m.Properties.ContentType)
	}
	if m.Properties.ResponseTopic != "" {
		p.SetText(packet.ResponseTopic, m.Properties.ResponseTopic)
	}
	if len(m.Properties.CorrelationData) > 0 {
		p.SetText(packet.CorrelationData, string(m.Properties.CorrelationData))
	}
	for _, u := range m.Properties.User {
		p.AddUser(u.Key, u.Value)
	}
	c.last++
	return c.last, c.put(bodyKey+number(c.last),
		body{Topic: m.Topic, Payload: m.Payload, Props: p.AppendForwarded(nil), QoS: m.Header.QoS, Retain: m.Header.Retain, From: m.Origin})
}
