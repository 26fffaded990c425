// Asks about a picture and streams the answer: over gRPC, or through the gateway with -gateway.
//
//	./generate.sh
//	go run . [-llm ADDR | -gateway URL] PICTURE QUESTION
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	v1 "twinlens-example/twinlensv1"
)

func main() {
	llm := flag.String("llm", "127.0.0.1:7002", "address of the LLM service")
	gateway := flag.String("gateway", "", "http address of a gateway, to be asked in place of the LLM service")
	flag.Parse()
	if flag.NArg() != 2 {
		flag.Usage()
		os.Exit(2)
	}
	picture, err := os.ReadFile(flag.Arg(0))
	if err == nil && *gateway != "" {
		err = askGateway(*gateway, picture, flag.Arg(1))
	} else if err == nil {
		err = askService(*llm, picture, flag.Arg(1))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "ask:", err)
		os.Exit(1)
	}
}

// askService streams the answer over gRPC.
func askService(address string, picture []byte, question string) error {
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	media := &v1.Media{Modality: v1.Modality_MODALITY_IMAGE, Source: &v1.Media_Data{Data: picture}}
	message := &v1.ChatMessage{Role: "user", Parts: []*v1.ChatPart{
		{Part: &v1.ChatPart_Media{Media: media}},
		{Part: &v1.ChatPart_Text{Text: question}},
	}}
	chat := &v1.ChatInput{Messages: []*v1.ChatMessage{message}}
	stream, err := v1.NewLlmServiceClient(connection).Generate(
		context.Background(), &v1.GenerateRequest{
			Input:    &v1.GenerateRequest_Chat{Chat: chat},
			Sampling: &v1.SamplingParams{Temperature: proto.Float64(0), MaxTokens: proto.Int32(256)},
		})
	if err != nil {
		return err
	}
	for {
		event, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			fmt.Println()
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(event.GetDelta().GetText())
	}
}

// askGateway streams the same answer by OpenAI's API.
func askGateway(address string, picture []byte, question string) error {
	url := "data:image/png;base64," + base64.StdEncoding.EncodeToString(picture)
	body, err := json.Marshal(map[string]any{
		"stream": true, "temperature": 0, "max_tokens": 256,
		"messages": []any{map[string]any{"role": "user", "content": []any{
			map[string]any{"type": "image_url", "image_url": map[string]any{"url": url}},
			map[string]any{"type": "text", "text": question},
		}}},
	})
	if err != nil {
		return err
	}
	answer, err := http.Post(address+"/v1/chat/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(answer.Body)
		return fmt.Errorf("%s: %s", answer.Status, text)
	}
	lines := bufio.NewScanner(answer.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data := strings.TrimPrefix(lines.Text(), "data: ")
		if data == lines.Text() || data == "[DONE]" {
			continue
		}
		var chunk struct {
			Choices []struct {
				Delta struct{ Content string }
			}
		}
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			return err
		}
		for _, choice := range chunk.Choices {
			fmt.Print(choice.Delta.Content)
		}
	}
	fmt.Println()
	return lines.Err()
}
