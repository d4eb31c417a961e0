# The boot sector that tells whether an accelerator runs guests: what every kernel does first, in 16, 32 and 64 bits with
# paging, and ten interrupts of the timer. Then it writes 0x2a to QEMU's device isa-debug-exit, whose exit code is
# 2*0x2a+1 = 85. The firmware has run when it begins.
#
#	as -o probe.o probe.S && ld -Ttext 0x7c00 --oformat binary -e start -o probe.bin probe.o

.code16
.globl start
start:	cli
	xorw	%ax, %ax
	movw	%ax, %ds
	movw	%ax, %es
	movw	%ax, %ss
	movw	$0x7c00, %sp
	cld
	# Tables at 0x1000, 0x2000 and 0x3000 that map the first 2 MiB to themselves; the interrupt table is at 0x4000.
	movl	$0x1000, %edi
	movl	$0x1000, %ecx
	xorl	%eax, %eax
	rep stosl
	movl	$0x2003, 0x1000
	movl	$0x3003, 0x2000
	movl	$0x83, 0x3000
	# Gate 0x20: tick, in the code segment 8.
	movl	$tick, %eax
	movw	%ax, 0x4200
	movw	$8, 0x4202
	movw	$0x8e00, 0x4204
	movl	%cr4, %eax
	orl	$0x20, %eax			# PAE
	movl	%eax, %cr4
	movl	$0x1000, %eax
	movl	%eax, %cr3
	movl	$0xc0000080, %ecx		# EFER
	rdmsr
	orl	$0x100, %eax			# LME
	wrmsr
	lgdt	gdtr
	movl	%cr0, %eax
	orl	$0x80000001, %eax		# PG, PE
	movl	%eax, %cr0
	ljmp	$8, $long

.code64
long:	lidt	idtr
	# The interrupt controllers: IRQ 0 is 0x20, all others are masked.
	movb	$0x11, %al
	outb	%al, $0x20
	outb	%al, $0xa0
	movb	$0x20, %al
	outb	%al, $0x21
	movb	$0x28, %al
	outb	%al, $0xa1
	movb	$4, %al
	outb	%al, $0x21
	movb	$2, %al
	outb	%al, $0xa1
	movb	$1, %al
	outb	%al, $0x21
	outb	%al, $0xa1
	movb	$0xfe, %al
	outb	%al, $0x21
	movb	$0xff, %al
	outb	%al, $0xa1
	# The timer: 1000 times a second.
	movb	$0x34, %al
	outb	%al, $0x43
	movb	$0xa9, %al
	outb	%al, $0x40
	movb	$0x04, %al
	outb	%al, $0x40
	xorl	%ebx, %ebx
	movl	$0x7c00, %esp
	sti
again:	hlt
	cmpl	$10, %ebx
	jb	again
	movw	$0x501, %dx
	movb	$0x2a, %al
	outb	%al, %dx
	cli
dead:	hlt
	jmp	dead

tick:	incl	%ebx
	pushq	%rax
	movb	$0x20, %al
	outb	%al, $0x20
	popq	%rax
	iretq

.balign 8
gdt:	.quad	0, 0x00209a0000000000		# 64-bit code
gdtr:	.word	15
	.long	gdt
idtr:	.word	0xfff
	.quad	0x4000
.org 510
	.word	0xaa55
