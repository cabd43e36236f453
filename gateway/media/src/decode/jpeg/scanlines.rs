//! Rows of a JPEG as libjpeg-turbo makes them, one band after the other.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;
use std::ptr::NonNull;

// its build is what the reader in C is linked with
use turbojpeg_sys as _;

/// Progressive files of sane encoders hold about ten scans; each costs a pass over the picture, so
/// that a small file of many thousands would hold a core for minutes.
const MAX_SCANS: c_int = 100;

#[repr(C)]
struct Reader {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    fn m3stack_jpeg_new() -> *mut Reader;
    fn m3stack_jpeg_free(reader: *mut Reader);
    fn m3stack_jpeg_message(reader: *const Reader) -> *const c_char;
    fn m3stack_jpeg_open(
        reader: *mut Reader,
        bytes: *const u8,
        length: usize,
        max_scans: c_int,
        facts: *mut u32,
    ) -> c_int;
    fn m3stack_jpeg_start(reader: *mut Reader) -> c_int;
    fn m3stack_jpeg_rows(reader: *mut Reader, rows: *mut u8, pitch: usize, count: u32) -> c_int;
    fn m3stack_jpeg_finish(reader: *mut Reader) -> c_int;
}

/// An open file; what the library says of its damage is the error of every call.
pub(super) struct Scanlines<'a> {
    reader: NonNull<Reader>,
    width: u32,
    height: u32,
    is_cmyk: bool,
    /// Whether the first row may be asked for.
    is_started: bool,
    given: u32,
    /// The library reads from the file until the end.
    _file: PhantomData<&'a [u8]>,
}

impl<'a> Scanlines<'a> {
    /// Reads the header.
    ///
    /// # Errors
    /// What the library says.
    pub(super) fn open(file: &'a [u8]) -> Result<Self, String> {
        // SAFETY: it takes nothing and gives a reader of its own, or null.
        let reader = NonNull::new(unsafe { m3stack_jpeg_new() }).ok_or("out of memory")?;
        let mut scanlines = Self {
            reader,
            width: 0,
            height: 0,
            is_cmyk: false,
            is_started: false,
            given: 0,
            _file: PhantomData,
        };
        let mut facts = [0_u32; 3];
        // SAFETY: the reader is ours, the file outlives it by its lifetime, `facts` has three places.
        let outcome = unsafe {
            m3stack_jpeg_open(
                reader.as_ptr(),
                file.as_ptr(),
                file.len(),
                MAX_SCANS,
                facts.as_mut_ptr(),
            )
        };
        scanlines.check(outcome)?;
        scanlines.width = facts[0];
        scanlines.height = facts[1];
        scanlines.is_cmyk = facts[2] != 0;
        Ok(scanlines)
    }

    /// Columns and rows, as the library read them.
    pub(super) fn size(&self) -> (u32, u32) {
        (self.width, self.height)
    }

    /// Whether pixels have four bytes, of ink; otherwise three, of light.
    pub(super) fn is_cmyk(&self) -> bool {
        self.is_cmyk
    }

    /// Bytes of a row.
    pub(super) fn row_bytes(&self) -> usize {
        self.width as usize * if self.is_cmyk { 4 } else { 3 }
    }

    /// Rows not given yet.
    pub(super) fn rows_left(&self) -> u32 {
        self.height - self.given
    }

    /// Fills `rows` with the next rows; after the last one the rest of the file is looked at.
    ///
    /// # Errors
    /// What the library says.
    ///
    /// # Panics
    /// When `rows` are not whole rows, or more than are left.
    pub(super) fn read(&mut self, rows: &mut [u8]) -> Result<(), String> {
        let row_bytes = self.row_bytes();
        assert!(rows.len().is_multiple_of(row_bytes), "not whole rows");
        let count = (rows.len() / row_bytes) as u32;
        assert!(count <= self.rows_left(), "{count} rows of {}", self.rows_left());
        if !self.is_started {
            // SAFETY: the reader has read its header.
            self.check(unsafe { m3stack_jpeg_start(self.reader.as_ptr()) })?;
            self.is_started = true;
        }
        // SAFETY: the reader has been started, and `rows` holds `count` rows of its width.
        let outcome =
            unsafe { m3stack_jpeg_rows(self.reader.as_ptr(), rows.as_mut_ptr(), row_bytes, count) };
        self.check(outcome)?;
        self.given += count;
        if self.rows_left() == 0 && count > 0 {
            // SAFETY: all rows of the reader were taken.
            self.check(unsafe { m3stack_jpeg_finish(self.reader.as_ptr()) })?;
        }
        Ok(())
    }

    fn check(&self, outcome: c_int) -> Result<(), String> {
        if outcome != 0 {
            return Ok(());
        }
        // SAFETY: the message lives in the reader and ends with a zero byte.
        let message = unsafe { CStr::from_ptr(m3stack_jpeg_message(self.reader.as_ptr())) };
        Err(message.to_string_lossy().into_owned())
    }
}

impl Drop for Scanlines<'_> {
    fn drop(&mut self) {
        // SAFETY: the reader is ours, and nobody uses it afterwards.
        unsafe { m3stack_jpeg_free(self.reader.as_ptr()) };
    }
}
