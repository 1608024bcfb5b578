// SPDX-License-Identifier: MIT

//! One decode step from Rust. The request has one key, so every output must be that key's value for any query.
//!
//! bindgen makes the bindings from the header; no crate is needed. From the checkout's root:
//!
//!     bindgen --allowlist-function 'fmla_.*' --allowlist-var 'FMLA_.*' -o build/flashmla.rs include/flashmla/flashmla.h
//!     OUT_DIR=$PWD/build rustc --edition 2021 -L build/release -l flashmla -o build/decode examples/rust/decode.rs
//!     LD_LIBRARY_PATH=build/release build/decode

#[allow(non_camel_case_types, dead_code)]
mod flashmla {
    include!(concat!(env!("OUT_DIR"), "/flashmla.rs"));
}
use flashmla::*;
use std::{ffi::CStr, mem, process::exit, ptr};

const HEADS: usize = 16;
const D_QK: usize = 576;
const D_V: usize = 512;
const PAGE: usize = 64;
const BF16_ONE: u16 = 0x3f80;

/// Returns a contiguous tensor in host memory. It holds addresses only: data and shape must outlive it.
fn tensor<T>(data: &mut [T], code: i32, shape: &[i64]) -> fmla_tensor {
    assert_eq!(data.len() as i64, shape.iter().product());
    fmla_tensor {
        data: data.as_mut_ptr().cast(),
        device: fmla_device {
            device_type: FMLA_DEVICE_CPU,
            id: 0,
        },
        ndim: shape.len() as i32,
        dtype: fmla_dtype {
            code: code as u8,
            bits: 8 * mem::size_of::<T>() as u8,
            lanes: 1,
        },
        shape: shape.as_ptr(),
        strides: ptr::null(),
        byte_offset: 0,
    }
}

fn check(status: fmla_status) {
    if status != FMLA_OK {
        let message = unsafe { CStr::from_ptr(fmla_last_error()) };
        eprintln!("status {status}: {}", message.to_string_lossy());
        exit(1);
    }
}

fn main() {
    assert_eq!(
        unsafe { fmla_version() },
        FMLA_VERSION as i32,
        "the header and the library have different versions"
    );

    let mut q = vec![BF16_ONE; HEADS * D_QK];
    let mut cache: Vec<u16> = (0..PAGE * D_QK).map(|i| BF16_ONE + (i % 100) as u16).collect(); // 1 to 1.8
    let (mut table, mut seqlens) = ([0i32], [1i32]);
    let (mut out, mut lse) = (vec![0u16; HEADS * D_V], vec![0f32; HEADS]);

    let q = tensor(&mut q, FMLA_TYPE_BFLOAT, &[1, 1, HEADS as i64, D_QK as i64]);
    let kv_cache = tensor(&mut cache, FMLA_TYPE_BFLOAT, &[1, PAGE as i64, 1, D_QK as i64]);
    let block_table = tensor(&mut table, FMLA_TYPE_INT, &[1, 1]);
    let lengths = tensor(&mut seqlens, FMLA_TYPE_INT, &[1]);
    let result = tensor(&mut out, FMLA_TYPE_BFLOAT, &[1, 1, HEADS as i64, D_V as i64]);
    let lse_result = tensor(&mut lse, FMLA_TYPE_FLOAT, &[1, HEADS as i64, 1]);

    // As FMLA_INIT does in C: 0 is the default of every member, and struct_size tells the library which header was used.
    let mut args = fmla_dense_decode_args {
        struct_size: mem::size_of::<fmla_dense_decode_args>() as _,
        q: &q,
        kv_cache: &kv_cache,
        block_table: &block_table,
        seqlens: &lengths,
        out: &result,
        lse: &lse_result,
        causal: 1,
        ..unsafe { mem::zeroed() }
    };
    // The simplest workspace is a vector with room for the size and for the alignment.
    let (mut bytes, mut alignment) = (0, 0);
    check(unsafe { fmla_dense_decode_workspace_size(&args, &mut bytes, &mut alignment) });
    let mut workspace = vec![0u8; (bytes + alignment) as usize];
    let start = workspace.as_ptr().align_offset(alignment as usize);
    args.workspace = workspace[start..].as_mut_ptr().cast();
    args.workspace_size = bytes;
    check(unsafe { fmla_dense_decode(&args) });

    let wrong = (0..HEADS * D_V).filter(|i| out[*i] != cache[i % D_V]).count();
    println!(
        "from Rust: {HEADS} heads, lse {:.4}: {wrong} values are not the only key's",
        lse[0]
    );
    exit((wrong != 0) as i32);
}
