;; The elements of the second module replace one that the start function of the first module calls: run returns 1.
(component
  (core module $a
    (type $t (func))
    (table (export "t") 1 funcref)
    (global $g (mut i32) (i32.const 0))
    (func $f (global.set $g (i32.const 1)))
    (elem (i32.const 0) func $f)
    (func $start (call_indirect (type $t) (i32.const 0)))
    (start $start)
    (func (export "get") (param i32) (result i32) (global.get $g)))
  (core module $b
    (import "a" "t" (table 1 funcref))
    (func $h)
    (elem (i32.const 0) func $h))
  (core instance $ia (instantiate $a))
  (core instance $ib (instantiate $b (with "a" (instance $ia))))
  (func (export "run") (param "n" u32) (result u32) (canon lift (core func $ia "get"))))
