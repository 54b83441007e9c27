//! `POST /v1/chat/completions`.

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    Header, Pieces, SAMPLING, StreamOptions, check_max_tokens, finish_reason, includes_usage,
};
use crate::generation::GenerationRequest;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::integer::Integer;
use crate::http::job::{Chunk, Ending, Job};
use crate::http::respond::{Format, respond};
use crate::http::sampling::{Sampling, check_n_probs, check_unsupported};
use crate::http::{Chat, Shared};

#[derive(Deserialize)]
struct Body {
    messages: Vec<Message>,
    tools: Option<Vec<Map<String, Value>>>,
    tool_choice: Option<Value>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<Integer>,
    max_completion_tokens: Option<Integer>,
    logprobs: Option<bool>,
    top_logprobs: Option<Integer>,
}

/// A message: `role`, `content`, and other keys for the template.
#[derive(Deserialize)]
struct Message {
    role: String,
    content: Option<Content>,
    name: Option<String>,
    tool_calls: Option<Vec<Map<String, Value>>>,
    tool_call_id: Option<String>,
    reasoning_content: Option<String>,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string or a list of parts with `type` and `text`"
)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    r#type: String,
    text: Option<String>,
}

/// `POST /v1/chat/completions`.
pub(in crate::http) async fn create(
    State(server): State<Shared>,
    body: JsonBody,
) -> Result<Response, ApiError> {
    check_unsupported(&body)?;
    let sampling: Sampling = body.read()?;
    let body: Body = body.read()?;
    let includes_usage = includes_usage(body.stream_options.as_ref());
    let n_predict = n_predict(&body)?;
    let n_probs = n_probs(&body)?;
    let params = sampling.params(SAMPLING)?;
    let stops = sampling.stops()?;
    let chat = chat(body)?;
    let prompt = server.blocking(move |backend| backend.chat_prompt(&chat));
    let prompt = prompt
        .await?
        .map_err(|message| ApiError::param("messages", format!("messages: {message}")))?;
    let job = Job {
        request: GenerationRequest {
            prompt,
            sampling: params,
            n_predict,
            n_probs,
            ignore_eos: sampling.ignore_eos(),
            deadline: None,
        },
        stops,
    };
    let object = if sampling.is_stream() {
        "chat.completion.chunk"
    } else {
        "chat.completion"
    };
    let format = ChatCompletion {
        header: Header::new("chatcmpl", object, &server.backend.model().name),
        pieces: Pieces::of(&server),
        has_logprobs: n_probs.is_some(),
        includes_usage,
    };
    respond(&server, vec![job], sampling.is_stream(), format).await
}

/// `max_completion_tokens`, or its old name `max_tokens`.
fn n_predict(body: &Body) -> Result<Option<usize>, ApiError> {
    let old = check_max_tokens("max_tokens", body.max_tokens)?;
    let new = check_max_tokens("max_completion_tokens", body.max_completion_tokens)?;
    Ok(new.or(old))
}

fn n_probs(body: &Body) -> Result<Option<usize>, ApiError> {
    let n_top = check_n_probs("top_logprobs", body.top_logprobs)?.unwrap_or(0);
    let has_logprobs = body.logprobs.unwrap_or(false);
    if n_top > 0 && !has_logprobs {
        let message = "top_logprobs: set logprobs to true to request log probabilities";
        return Err(ApiError::param("top_logprobs", message));
    }
    Ok(has_logprobs.then_some(n_top))
}

/// The conversation, without tools if the model must not use them.
fn chat(body: Body) -> Result<Chat, ApiError> {
    if body.messages.is_empty() {
        return Err(ApiError::param("messages", "messages: the list is empty"));
    }
    let tools = body.tools.unwrap_or_default();
    let tools = match body.tool_choice.as_ref().map(Value::as_str) {
        None | Some(Some("auto")) => tools,
        Some(Some("none")) => Vec::new(),
        Some(_) => {
            let message = "tool_choice: only \"auto\" and \"none\" are supported";
            return Err(ApiError::param("tool_choice", message));
        }
    };
    let messages = body.messages.into_iter().enumerate();
    Ok(Chat {
        messages: messages
            .map(|(index, message)| message.into_json(index))
            .collect::<Result<_, _>>()?,
        tools: tools.into_iter().map(Value::Object).collect(),
    })
}

impl Message {
    /// The message with the text of its content, without missing keys.
    fn into_json(self, index: usize) -> Result<Value, ApiError> {
        let content = match self.content {
            None => None,
            Some(Content::Text(text)) => Some(text),
            Some(Content::Parts(parts)) => Some(text_of(parts, index)?),
        };
        let mut message = json!({"role": self.role, "content": content});
        for (key, value) in [
            ("name", self.name.map(Value::from)),
            ("tool_calls", self.tool_calls.map(Value::from)),
            ("tool_call_id", self.tool_call_id.map(Value::from)),
            ("reasoning_content", self.reasoning_content.map(Value::from)),
        ] {
            if let Some(value) = value {
                message[key] = value;
            }
        }
        Ok(message)
    }
}

/// The text of all parts. Only parts with text are supported.
fn text_of(parts: Vec<Part>, index: usize) -> Result<String, ApiError> {
    let parts = parts.into_iter().map(|part| {
        let is_text = part.r#type == "text";
        part.text.filter(|_| is_text).ok_or_else(|| {
            let param = format!("messages[{index}].content");
            let message = format!("{param}: only parts of type \"text\" are supported");
            ApiError::param(param, message)
        })
    });
    parts.collect()
}

struct ChatCompletion {
    header: Header,
    pieces: Pieces,
    has_logprobs: bool,
    includes_usage: bool,
}

impl ChatCompletion {
    fn logprobs(&self, chunk: &Chunk) -> Option<Value> {
        self.has_logprobs.then(|| self.pieces.chat(&chunk.tokens))
    }

    fn event(
        &self,
        index: usize,
        delta: &Value,
        logprobs: Option<Value>,
        ending: Option<&Ending>,
    ) -> Value {
        let choice = json!({
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": ending.map(finish_reason),
        });
        self.header.event(vec![choice], self.includes_usage)
    }
}

impl Format for ChatCompletion {
    const ENDPOINT: &'static str = "chat";
    const LAST_EVENT: Option<&'static str> = Some("[DONE]");

    fn start(&self, index: usize) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        Some(self.event(index, &delta, None, None))
    }

    fn chunk(&self, index: usize, chunk: &Chunk) -> Value {
        let delta = json!({"content": chunk.text});
        self.event(index, &delta, self.logprobs(chunk), None)
    }

    fn end(&self, index: usize, ending: &Ending) -> Value {
        self.event(index, &json!({}), None, Some(ending))
    }

    fn usage(&self, endings: &[Ending]) -> Option<Value> {
        let usage = || self.header.with_usage(Vec::new(), endings.iter());
        self.includes_usage.then(usage)
    }

    fn complete(&self, texts: &[(Chunk, Ending)]) -> Value {
        let choices = texts.iter().enumerate().map(|(index, (chunk, ending))| {
            json!({
                "index": index,
                "message": {"role": "assistant", "content": chunk.text, "refusal": null},
                "logprobs": self.logprobs(chunk),
                "finish_reason": finish_reason(ending),
            })
        });
        let endings = texts.iter().map(|(_, ending)| ending);
        self.header.with_usage(choices.collect(), endings)
    }
}
