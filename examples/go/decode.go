// SPDX-License-Identifier: MIT

// One decode step from Go. The request has one key, so every output must be that key's value for any query.
//
// cgo reads the header itself, so no bindings and no module are needed. From the checkout's root:
//
//	CGO_CFLAGS=-I$PWD/include CGO_LDFLAGS=-L$PWD/build/release go build -o build/decode examples/go/decode.go
//	LD_LIBRARY_PATH=build/release build/decode
package main

// #cgo LDFLAGS: -lflashmla
// #include <flashmla/flashmla.h>
// #include <stdlib.h>
import "C"

import (
	"fmt"
	"os"
	"unsafe"
)

const (
	heads   = 16
	dQK     = 576
	dV      = 512
	page    = 64
	bf16One = 0x3f80
)

// zeroed allocates C memory. A tensor holds addresses of data and shape, and the arguments hold addresses of tensors. All of it
// is C memory, because cgo does not let Go memory that C receives contain pointers to other Go memory.
func zeroed(bytes uintptr) unsafe.Pointer { return C.calloc(1, C.size_t(bytes)) }

// tensor makes a contiguous tensor in host memory and returns its data as a slice too.
func tensor[T any](code C.uint8_t, shape ...int64) (*C.fmla_tensor, []T) {
	var element T
	dims := unsafe.Slice((*int64)(zeroed(uintptr(8*len(shape)))), len(shape))
	count := int64(1)
	for i, n := range shape {
		dims[i], count = n, count*n
	}
	t := (*C.fmla_tensor)(zeroed(unsafe.Sizeof(C.fmla_tensor{})))
	t.data = zeroed(unsafe.Sizeof(element) * uintptr(count))
	t.device = C.fmla_device{device_type: C.FMLA_DEVICE_CPU}
	t.ndim = C.int32_t(len(shape))
	t.dtype = C.fmla_dtype{code: code, bits: C.uint8_t(8 * unsafe.Sizeof(element)), lanes: 1}
	t.shape = (*C.int64_t)(unsafe.Pointer(&dims[0]))
	return t, unsafe.Slice((*T)(t.data), count)
}

func check(status C.fmla_status) {
	if status != C.FMLA_OK {
		fmt.Fprintf(os.Stderr, "status %d: %s\n", status, C.GoString(C.fmla_last_error()))
		os.Exit(1)
	}
}

func main() {
	if C.fmla_version() != C.FMLA_VERSION {
		panic("the header and the library have different versions")
	}
	// As FMLA_INIT does in C: 0 is the default of every member, and struct_size tells the library which header was used.
	args := C.fmla_dense_decode_args{struct_size: C.sizeof_fmla_dense_decode_args, causal: 1}
	var q, cache, out []uint16
	var lengths []int32
	var lse []float32
	args.q, q = tensor[uint16](C.FMLA_TYPE_BFLOAT, 1, 1, heads, dQK)
	args.kv_cache, cache = tensor[uint16](C.FMLA_TYPE_BFLOAT, 1, page, 1, dQK)
	args.block_table, _ = tensor[int32](C.FMLA_TYPE_INT, 1, 1)
	args.seqlens, lengths = tensor[int32](C.FMLA_TYPE_INT, 1)
	args.out, out = tensor[uint16](C.FMLA_TYPE_BFLOAT, 1, 1, heads, dV)
	args.lse, lse = tensor[float32](C.FMLA_TYPE_FLOAT, 1, heads, 1)
	for i := range q {
		q[i] = bf16One
	}
	for i := range cache {
		cache[i] = bf16One + uint16(i%100) // 1 to 1.8
	}
	lengths[0] = 1

	var alignment C.size_t
	check(C.fmla_dense_decode_workspace_size(&args, &args.workspace_size, &alignment))
	args.workspace = C.aligned_alloc(alignment, (args.workspace_size+alignment-1)/alignment*alignment)
	check(C.fmla_dense_decode(&args))

	wrong := 0
	for i := range out {
		if out[i] != cache[i%dV] {
			wrong++
		}
	}
	fmt.Printf("from Go: %d heads, lse %.4f: %d values are not the only key's\n", heads, lse[0], wrong)
	if wrong > 0 {
		os.Exit(1)
	}
}
