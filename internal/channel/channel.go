package channel

import (
	"fmt"
	"strings"
	"unicode"

	"github.com/containerd/errdefs"
)

// maxName is the maximum length of a file name, in bytes.
const maxName = 255

// Channel is a channel that a module can open by name.
type Channel struct {
	// Name is the file's name in the guest's /ch. The names "stdin", "stdout" and "stderr" mean the standard streams.
	Name string `json:"name"`
	// Topic is the topic or, for a read-only channel, the filter.
	Topic string `json:"topic"`
	// Flags are the most permissive mode that the module can open the channel with.
	Flags Flags `json:"flags"`
}

// Validate checks the channels of one module. The error is errdefs.ErrInvalidArgument, and its text names the channel.
func Validate(all []Channel) error {
	if len(all) > MaxChannels {
		return fmt.Errorf("%d channels: a module can have %d: %w", len(all), MaxChannels, errdefs.ErrInvalidArgument)
	}
	names := map[string]bool{}
	for i, c := range all {
		err := c.validate()
		if err == nil && names[c.Name] {
			err = fmt.Errorf("the name is used twice: %w", errdefs.ErrInvalidArgument)
		}
		if err != nil {
			return fmt.Errorf("channel %d (%q): %w", i, c.Name, err)
		}
		names[c.Name] = true
	}
	return nil
}

func (c Channel) validate() error {
	switch {
	case c.Name == "" || c.Name == "." || c.Name == ".." || len(c.Name) > maxName,
		strings.ContainsFunc(c.Name, func(r rune) bool { return r == '/' || unicode.IsControl(r) }):
		return fmt.Errorf("the name is not a file name: %w", errdefs.ErrInvalidArgument)
	case c.Flags > ReadWrite|QoS1|QoS2:
		return fmt.Errorf("the flags %#x have unknown bits: %w", uint8(c.Flags), errdefs.ErrInvalidArgument)
	}
	return validMode(c.Flags, c.Topic)
}

// validMode checks that a channel on the topic can have the flags.
func validMode(flags Flags, topic string) error {
	switch {
	case flags&ReadWrite == 0:
		return fmt.Errorf("the flags %#x on %q have neither read (1) nor write (2): %w", uint8(flags), topic, errdefs.ErrInvalidArgument)
	case flags.CanWrite() && HasWildcard(topic):
		return fmt.Errorf("the topic %q has a wildcard, which only a read-only channel can have: %w", topic, errdefs.ErrInvalidArgument)
	}
	return ValidFilter(topic)
}
