package main

import "slices"

// tinyTicks is a guest that fits into one sector. It prints "tick 00001", "tick 00002", ... on the serial console,
// about five times a second, and turns the machine off when the power button is pressed. PC firmware boots tinyTicks
// much faster than any kernel, so tinyTicks suits tests of a machine's life cycle that need no real guest. The firmware
// loads it at 0x7c00 and runs it in real mode.
//
// The registers are those of QEMU's q35: PM1_STS is 0x600 and PM1_EN is 0x602; bit 8 of both is the power button.
// PM1_CNT is 0x604, where 0x2000 means "sleep, state 5".
var tinyTicks = slices.Concat(
	[]byte{
		0x31, 0xc0, // 00       xor  ax, ax
		0x8e, 0xd8, // 02       mov  ds, ax
		0x8e, 0xd0, // 04       mov  ss, ax
		0xbc, 0x00, 0x7c, // 06       mov  sp, 0x7c00
		0xba, 0x02, 0x06, // 09       mov  dx, 0x602
		0xb8, 0x00, 0x01, // 0c       mov  ax, 0x100
		0xef,             // 0f       out  dx, ax
		0xfb,             // 10       sti
		0xbe, 0x4a, 0x7c, // 11 line: mov  si, text
		0xba, 0xf8, 0x03, // 14       mov  dx, 0x3f8
		0xac,       // 17 next: lodsb
		0x84, 0xc0, // 18       test al, al
		0x74, 0x03, // 1a       jz   count
		0xee,       // 1c       out  dx, al
		0xeb, 0xf8, // 1d       jmp  next
		0xbf, 0x53, 0x7c, // 1f count: mov di, text+9
		0xfe, 0x05, // 22 digit: inc  byte [di]
		0x80, 0x3d, 0x3a, // 24       cmp  byte [di], '9'+1
		0x75, 0x06, // 27       jne  wait
		0xc6, 0x05, 0x30, // 29       mov  byte [di], '0'
		0x4f,       // 2c       dec  di
		0xeb, 0xf3, // 2d       jmp  digit
		0xb9, 0x04, 0x00, // 2f wait: mov  cx, 4
		0xf4,             // 32 halt: hlt        (the timer ticks 18.2 times a second)
		0xba, 0x00, 0x06, // 33       mov  dx, 0x600
		0xed,             // 36       in   ax, dx
		0xf6, 0xc4, 0x01, // 37       test ah, 1
		0x75, 0x04, // 3a       jnz  off
		0xe2, 0xf4, // 3c       loop halt
		0xeb, 0xd1, // 3e       jmp  line
		0xba, 0x04, 0x06, // 40 off:  mov  dx, 0x604
		0xb8, 0x00, 0x20, // 43       mov  ax, 0x2000
		0xef,       // 46       out  dx, ax
		0xf4,       // 47 dead: hlt
		0xeb, 0xfd, // 48       jmp  dead
	},
	[]byte("tick 00001\r\n\x00"), // 4a text
)

// tinyMachines adds three machines that boot from variants of tinyTicks. The first ticks. The second prints one line
// and turns itself off. The third ticks and ignores the power button.
func (s *set) tinyMachines() {
	ends, deaf := slices.Clone(tinyTicks), slices.Clone(tinyTicks)
	copy(ends[0x2f:], []byte{0xeb, 0x0f}) // wait: jmp off
	deaf[0x39] = 0                        // test ah, 0
	for _, machine := range []struct {
		name string
		code []byte
	}{{"tiny:1", tinyTicks}, {"tiny-ends:1", ends}, {"tiny-deaf:1", deaf}} {
		disk := make([]byte, 1<<20)
		copy(disk, machine.code)
		disk[510], disk[511] = 0x55, 0xaa
		t := tree{}
		t.file("disk/tiny.img", 0o644, disk)
		s.addMachine(vm+machine.name, t)
	}
}
