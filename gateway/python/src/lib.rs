//! The Python door: `m3stack._gateway`. Each function hands over to `gateway-server` with the
//! interpreter released; the only work here is turning types and errors.

// the shapes of pyo3's own macros
#![allow(missing_docs, clippy::needless_pass_by_value)]

use pyo3::prelude::*;

mod shared_rows;

// as in the gateway's own program: large pieces go back to the system, and come fast
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The gateway's own code, callable from Python.
#[pymodule]
mod _gateway {
    use std::path::PathBuf;

    use bytes::Bytes;
    use gateway_core::model::SizeControls;
    use gateway_media::{ImageSize, Patches};
    use gateway_server::error::GatewayError;
    use gateway_server::prepare;
    use pyo3::create_exception;
    use pyo3::exceptions::PyException;
    use pyo3::prelude::*;
    use pyo3::types::{PyBytes, PyMemoryView};

    use crate::shared_rows::SharedRows;

    create_exception!(
        m3stack._gateway,
        RefusedError,
        PyException,
        "The gateway refuses the request; args: message, param or None, code, HTTP status."
    );

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("RefusedError", module.py().get_type::<RefusedError>())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// Runs the gateway with these arguments until SIGTERM or SIGINT; gives its exit code.
    #[pyfunction]
    fn serve(py: Python<'_>, arguments: Vec<String>) -> u8 {
        let arguments = std::iter::once("m3stack gateway".to_owned()).chain(arguments);
        py.detach(|| gateway_server::run_with_arguments(arguments))
    }

    type ClipRows<'py> = (Bound<'py, PyBytes>, (u32, u32, u32), Vec<u64>, Vec<f64>);
    type PreparedChat<'py> = (Bound<'py, PyBytes>, Vec<Bound<'py, PyMemoryView>>);
    type PatchRows<'py> = (Bound<'py, PyBytes>, (u32, u32, u32));

    /// Prepares requests for one checkpoint.
    #[pyclass(frozen)]
    struct Preparer {
        inner: prepare::Preparer,
    }

    #[pymethods]
    impl Preparer {
        #[new]
        fn new(py: Python<'_>, model_path: PathBuf) -> PyResult<Self> {
            match py.detach(|| prepare::Preparer::open(&model_path)) {
                Ok(inner) => Ok(Self { inner }),
                Err(error) => Err(pyo3::exceptions::PyValueError::new_err(error.to_string())),
            }
        }

        /// (serialized GenerateHeader, patch bytes of each media item) of a chat request's body.
        fn prepare_chat<'py>(&self, py: Python<'py>, body: &[u8]) -> PyResult<PreparedChat<'py>> {
            let prepared = py.detach(|| self.inner.chat(body)).map_err(refused)?;
            let patches = prepared.patches.into_iter().map(|pieces| viewed(py, pieces));
            Ok((PyBytes::new(py, &prepared.header), patches.collect::<PyResult<_>>()?))
        }

        /// Ids of a text, control tokens in it meant as such.
        fn tokenize(&self, py: Python<'_>, text: &str) -> PyResult<Vec<u32>> {
            py.detach(|| self.inner.tokenize(text)).map_err(refused)
        }

        /// Text of ids, control tokens shown.
        fn detokenize(&self, py: Python<'_>, token_ids: Vec<u32>) -> String {
            py.detach(|| self.inner.detokenize(&token_ids))
        }

        /// (u8 patch rows, grid t h w) of a picture's file bytes; a still has one temporal copy.
        #[pyo3(signature = (data, *, detail=None, max_long_side_pixel=None))]
        fn preprocess_image<'py>(
            &self,
            py: Python<'py>,
            data: &[u8],
            detail: Option<String>,
            max_long_side_pixel: Option<i64>,
        ) -> PyResult<PatchRows<'py>> {
            let controls = SizeControls { detail, max_long_side_pixel, fps: None };
            let plan = py.detach(|| self.inner.plan_still(data, &controls)).map_err(refused)?;
            let mut grid = (0, 0, 0);
            // made where Python wants them: nobody else knows this value yet
            let rows = PyBytes::new_with(py, plan.num_bytes, |rows| {
                let made = py.detach(|| self.inner.fill_still(data, &plan, rows));
                grid = made.map(|grid| (grid.t, grid.h, grid.w)).map_err(refused)?;
                Ok(())
            })?;
            Ok((rows, grid))
        }

        /// (u8 patch rows, grid t h w, frame numbers, seconds of each temporal patch) of a clip's
        /// file bytes.
        #[pyo3(signature = (data, *, detail=None, max_long_side_pixel=None, fps=None))]
        fn preprocess_video<'py>(
            &self,
            py: Python<'py>,
            data: &[u8],
            detail: Option<String>,
            max_long_side_pixel: Option<i64>,
            fps: Option<f64>,
        ) -> PyResult<ClipRows<'py>> {
            let controls = SizeControls { detail, max_long_side_pixel, fps };
            let made = py.detach(|| self.inner.clip(Bytes::copy_from_slice(data), controls));
            let (pieces, plan) = made.map_err(refused)?;
            let grid = (plan.grid.t, plan.grid.h, plan.grid.w);
            Ok((joined(py, &pieces)?, grid, plan.frames, plan.patch_times_s))
        }

        /// (side of a patch, frames in a temporal patch, side of a merged square of patches).
        fn patch_layout(&self) -> (u32, u32, u32) {
            let layout = self.inner.patch_layout();
            (layout.patch_size, layout.temporal_patch_size, layout.merge_size)
        }

        /// (u8 patch rows, grid t h w) of RGB frames of `width * height * 3` bytes each.
        fn preprocess_frames<'py>(
            &self,
            py: Python<'py>,
            frames: Vec<Vec<u8>>,
            width: u32,
            height: u32,
        ) -> PyResult<PatchRows<'py>> {
            let size = ImageSize { width, height };
            let patches = py.detach(|| self.inner.frames(frames, size)).map_err(refused)?;
            Ok(rows(py, &patches))
        }
    }

    /// One piece as it is, several as one value.
    fn viewed(py: Python<'_>, mut pieces: Vec<Bytes>) -> PyResult<Bound<'_, PyMemoryView>> {
        let rows = match (pieces.pop(), pieces.is_empty()) {
            (Some(piece), true) => Bound::new(py, SharedRows(piece))?.into_any(),
            (last, _) => {
                pieces.extend(last);
                joined(py, &pieces)?.into_any()
            }
        };
        PyMemoryView::from(&rows)
    }

    /// One value of all the pieces.
    fn joined<'py>(py: Python<'py>, pieces: &[Bytes]) -> PyResult<Bound<'py, PyBytes>> {
        let length = pieces.iter().map(Bytes::len).sum();
        PyBytes::new_with(py, length, |mut rest| {
            for piece in pieces {
                let (place, after) = rest.split_at_mut(piece.len());
                place.copy_from_slice(piece);
                rest = after;
            }
            Ok(())
        })
    }

    fn rows<'py>(py: Python<'py>, patches: &Patches) -> PatchRows<'py> {
        let grid = patches.grid;
        (PyBytes::new(py, &patches.bytes), (grid.t, grid.h, grid.w))
    }

    fn refused(error: GatewayError) -> PyErr {
        RefusedError::new_err((
            error.message.clone(),
            error.param.clone(),
            error.code,
            error.kind.row().status,
        ))
    }
}
