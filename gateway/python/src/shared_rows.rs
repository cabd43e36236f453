//! Bytes of the gateway that Python reads without a copy.
#![allow(unsafe_code)]

use std::ffi::c_int;

use bytes::Bytes;
use pyo3::ffi;
use pyo3::prelude::*;

/// Patch rows that the gateway holds too, read by Python where they are.
#[pyclass(frozen)]
pub(crate) struct SharedRows(pub(crate) Bytes);

#[pymethods]
impl SharedRows {
    /// # Safety
    /// `view` is one that Python gives to be filled.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let rows = &slf.get().0;
        let length = isize::try_from(rows.len())?;
        let begin = rows.as_ptr().cast_mut().cast();
        const IS_READ_ONLY: c_int = 1;
        // SAFETY: the view keeps `slf` alive, and with it the bytes, which never move or change;
        // nobody can write by it. A view that asks to is refused.
        let outcome = unsafe {
            let owner = slf.as_ptr();
            ffi::PyBuffer_FillInfo(view, owner, begin, length, IS_READ_ONLY, flags)
        };
        if outcome == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
